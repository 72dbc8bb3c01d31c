"""Calls that may block inside torch, in threads."""

import threading

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


def test_a_call_is_given_up_when_poll_raises() -> None:
    """Python waits for its thread at exit."""
    end, polls = threading.Event(), []

    def poll() -> None:
        polls.append(1)
        if len(polls) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        call_in_thread(end.wait, name="a test", poll=poll, interval_seconds=0.001)
    ((thread, deadline),) = [each for each in threads._abandoned if each[0].name == "a test"]
    assert deadline is None
    end.set()
    thread.join(5)
    assert not thread.is_alive()
