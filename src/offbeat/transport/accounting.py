"""The account of one worker: how many bytes it has sent, and for how long it has waited."""

from collections.abc import Iterator
from contextlib import contextmanager


class Account:
    """Totals of the bytes that this worker sent and of the time for which it waited.

    Communicators add to their account. They count the operations that the training thread starts,
    and the waits of this thread. Those of background threads do not count.

    Attributes:
        payload_bytes: Bytes of the tensors that were passed to operations. A tensor counts once,
            however many workers receive it. A broadcast counts on its source only. Received tensors
            do not count.
        wait_seconds: Time for which this worker waited for others.
    """

    def __init__(self) -> None:
        self.payload_bytes = 0
        self.wait_seconds = 0.0
        self._paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Return a context in which nothing is counted, as during set-up and evaluation."""
        previous, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = previous

    def sent(self, payload_bytes: int) -> None:
        """Add to the bytes sent, unless counting is paused."""
        if not self._paused:
            self.payload_bytes += payload_bytes

    def waited(self, seconds: float) -> None:
        """Add to the waiting time, unless counting is paused."""
        if not self._paused:
            self.wait_seconds += seconds
