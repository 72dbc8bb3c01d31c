"""Signals that end a launcher in an orderly way."""

import os
import signal
import time
from types import FrameType, TracebackType


class Interruption:
    """Records the first SIGTERM or SIGINT while it is entered as a context manager.

    A second signal ends this process at once. On Linux the kernel then ends its workers.

    Attributes:
        signal: Number of the signal that has arrived; None before.
        since: Time of its arrival (``time.monotonic``).
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self.since = 0.0

    def __bool__(self) -> bool:
        return self.signal is not None

    def __enter__(self) -> "Interruption":
        self._before = {
            number: signal.getsignal(number)
            for number in (signal.SIGTERM, signal.SIGINT)
            # A background job of a shell script ignores SIGINT, and must continue to ignore it.
            if signal.getsignal(number) is not signal.SIG_IGN
        }
        for number in self._before:
            signal.signal(number, self._record)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _record(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            os._exit(128 + number)
        self.signal, self.since = number, time.monotonic()


def signal_name(number: int) -> str:
    """Return ``"SIGKILL"`` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
