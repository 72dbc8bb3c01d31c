"""Calls that may block inside torch, in threads."""

import signal
import threading
from functools import partial

import pytest

from offbeat.transport.torch_backend import threads
from offbeat.transport.torch_backend.threads import call_in_thread


def never() -> None:
    raise AssertionError("the call has not ended in time")


@pytest.mark.parametrize("kind", [RuntimeError, ValueError])
def test_an_exception_of_the_function_is_raised_on_the_calling_thread(
    kind: type[Exception],
) -> None:
    def fail() -> None:
        raise kind("no message")

    with pytest.raises(kind, match="no message"):
        call_in_thread(fail, name="a test", poll=never, interval_seconds=5)
    assert call_in_thread(lambda: 3, name="a test", poll=never, interval_seconds=5) == 3


def interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("polling", [True, False])
def test_a_call_is_given_up_at_ctrl_c(polling: bool) -> None:
    """Inside poll and between two polls. Python waits for its thread at exit."""
    end, before = threading.Event(), signal.signal(signal.SIGALRM, interrupt)
    poll = partial(signal.raise_signal, signal.SIGALRM) if polling else never
    signal.setitimer(signal.ITIMER_REAL, 0 if polling else 0.05)
    try:
        with pytest.raises(KeyboardInterrupt):
            call_in_thread(
                end.wait, name="a test", poll=poll, interval_seconds=0.001 if polling else 60
            )
    finally:
        signal.signal(signal.SIGALRM, before)
    thread = next(thread for thread, _ in threads._abandoned[::-1] if thread.name == "a test")
    assert thread.is_alive(), "Python still knows that it runs"
    end.set()
    thread.join(5)
    assert not thread.is_alive()
