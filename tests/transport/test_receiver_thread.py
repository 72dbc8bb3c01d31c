"""The thread that waits for messages in place of the main thread."""

import time

import pytest

from offbeat.transport.torch_backend.receiver_thread import ReceiverThread


@pytest.mark.parametrize("kind", [RuntimeError, ValueError])
def test_an_exception_of_the_wait_is_raised_on_the_calling_thread(kind: type[Exception]) -> None:
    receiver, deadline = ReceiverThread(), time.monotonic() + 5

    def fail() -> None:
        raise kind("no message")

    try:
        with pytest.raises(kind, match="no message"):
            receiver.wait(fail, lambda: time.monotonic() > deadline)
        receiver.wait(lambda: None, lambda: time.monotonic() > deadline)  # the thread still works
    finally:
        receiver.close(1.0)
