"""At which step all workers of a run save and leave, when the run is asked to end early."""

import fcntl
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager

from offbeat.errors import CommunicationTimeout

_SAVED = -1
_WORD = struct.Struct("q")
_OVER = 1 << 62  # beyond every step


class Leaving:
    """Agrees on the step through a file that all processes of this machine see.

    A worker writes down to which step it goes before it goes there. Who asks them to leave takes
    the largest of these steps. Both happen under a lock, so no worker has gone beyond that step,
    and all of them come to it, whoever waits for whom meanwhile: under an asynchronous strategy
    they may be far apart.

    Args:
        path: The file; made if it is not there.
        workers: Of the run.
    """

    def __init__(self, path: str | os.PathLike[str], workers: int) -> None:
        self._workers = workers
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if os.fstat(self._file).st_size == 0:
            os.ftruncate(self._file, _WORD.size * (1 + workers))

    def close(self) -> None:
        """Give the file back."""
        os.close(self._file)

    def goes_on(self, rank: int, step: int, *, last: int, seconds: float) -> bool:
        """Whether worker ``rank``, which has taken ``step`` of ``last`` steps, takes another.

        Raises:
            CommunicationTimeout: another process holds the lock for so many seconds.
        """
        try:
            with self._locked(seconds):
                return self._goes_on(rank, step, last)
        except TimeoutError:
            raise CommunicationTimeout(
                f"rank {rank}: another worker holds the lock at the end of step {step} for "
                f"{seconds:g} s, it is stopped perhaps; --timeout raises that"
            ) from None

    def _goes_on(self, rank: int, step: int, last: int) -> bool:
        asked = self._read(0)
        if asked and step >= asked:
            return False
        if not asked:
            self._write(1 + rank, step + 1 if step < last else _OVER)
        return True

    def saved(self, rank: int, seconds: float) -> None:
        """Worker ``rank`` has saved. Wait for the others, so long at most.

        One that left before would break a connection in which another one still saves.
        """
        self._write(1 + rank, _SAVED)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and any(one != _SAVED for one in self._steps()):
            time.sleep(0.01)

    def ask(self, seconds: float) -> int | None:
        """Let all leave. The step at which they do; None if there is nothing to save.

        No worker has begun then, or one has ended; or a worker holds the lock for so long.
        """
        try:
            with self._locked(seconds):
                step = max(self._steps())
                if step in (0, _OVER):
                    return None
                self._write(0, step)
                return step
        except TimeoutError:
            return None

    def _steps(self) -> Iterator[int]:
        return (self._read(1 + rank) for rank in range(self._workers))

    def _read(self, index: int) -> int:
        (value,) = _WORD.unpack(os.pread(self._file, _WORD.size, _WORD.size * index))
        return int(value)

    def _write(self, index: int, value: int) -> None:
        os.pwrite(self._file, _WORD.pack(value), _WORD.size * index)

    @contextmanager
    def _locked(self, seconds: float) -> Iterator[None]:
        """The kernel unlocks for a process that ends."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError from None
                time.sleep(0.0005)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)
