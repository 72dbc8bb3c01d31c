"""Agreement on the step after which all workers save a checkpoint and exit early."""

import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager

from offbeat import CommunicationTimeout

_SAVED = -1
_FINISHED = 1 << 62  # larger than every step
_INTEGER = struct.Struct("q")


class StopRequest:
    """A file through which another process of this machine asks the workers of a run to stop.

    The file holds the requested step (0: no request), then one number for each worker:

    * 0 before the worker starts,
    * the step that it is taking; the worker writes the number before it begins the step,
    * 2⁶² once it has taken its last step,
    * −1 once it has saved. After a request a worker writes nothing else.

    The requester writes the maximum of these numbers as the requested step, unless it is 0 or 2⁶².
    A lock on the file keeps workers from beginning a step meanwhile. So no worker has passed the
    requested step, and all save after exactly this step. Example: three workers are in steps 7, 9
    and 8. The requested step is 9, and the first and the last worker continue to it.

    Args:
        path: Path of the file; created if it does not exist.
        workers: Number of workers of the run.
    """

    def __init__(self, path: str | os.PathLike[str], workers: int) -> None:
        self._workers = workers
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if os.fstat(self._file).st_size == 0:
            os.ftruncate(self._file, _INTEGER.size * (1 + workers))

    def may_continue(self, rank: int, step: int, *, last: int, seconds: float) -> bool:
        """Report the worker's step. Return False if the worker must save and exit now.

        A worker calls this before its first step and after each step. If the result is True, it
        takes its next step or, after the ``last`` one, finishes.

        Args:
            rank: Rank of the calling worker.
            step: Number of steps that it has taken.
            last: Number of steps of the run.
            seconds: Longest time to wait for the lock.

        Raises:
            CommunicationTimeout: The lock was not free within ``seconds``.
        """
        try:
            with self._lock(seconds):
                requested = self._read(0)
                if not requested:
                    self._write(1 + rank, step + 1 if step < last else _FINISHED)
                return not requested or step < requested
        except TimeoutError:
            raise CommunicationTimeout(
                f"rank {rank}: another worker has held the lock at the end of step {step} for "
                f"{seconds:g} s and may be suspended; --timeout raises this limit"
            ) from None

    def wait_until_all_saved(self, rank: int, seconds: float) -> None:
        """Report that worker ``rank`` has saved, and wait at most ``seconds`` for the others.

        An earlier exit would break connections that others still need for saving.
        """
        self._write(1 + rank, _SAVED)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and any(step != _SAVED for step in self._steps()):
            time.sleep(0.01)

    def request(self, seconds: float) -> int | None:
        """Ask all workers to save and exit. Waits at most ``seconds`` for the lock.

        Returns:
            The step after which the workers exit; −1 if all have already saved. None if no request
            was made: no worker has started, one has taken its last step, or the lock was not free.
        """
        try:
            with self._lock(seconds):
                step = max(self._steps())
                if step in (0, _FINISHED):
                    return None
                self._write(0, step)
                return step
        except TimeoutError:
            return None

    def _steps(self) -> Iterator[int]:
        return (self._read(1 + rank) for rank in range(self._workers))

    def _read(self, index: int) -> int:
        (value,) = _INTEGER.unpack(os.pread(self._file, _INTEGER.size, _INTEGER.size * index))
        return int(value)

    def _write(self, index: int, value: int) -> None:
        os.pwrite(self._file, _INTEGER.pack(value), _INTEGER.size * index)

    @contextmanager
    def _lock(self, seconds: float) -> Iterator[None]:
        """Hold the lock on the file. The kernel releases it if the process ends."""
        import fcntl  # not on Windows, where `offbeat plan` imports this module, too

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
