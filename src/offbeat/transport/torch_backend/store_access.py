"""Access to a ``torch.distributed`` store with a time limit, or without blocking at all."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from offbeat.transport.torch_backend.threads import call_in_thread

T = TypeVar("T")
_SLICES = 20  # number of short waits in call_within()
_CLOSE_SECONDS = 1.0  # time limit of KeyPoll.close()


class NoAnswerError(RuntimeError):
    """The store has not answered within the time limit."""


def call_within(seconds: float, function: Callable[[], T]) -> T:
    """Call ``function``, which accesses a store, in a thread, and return its result.

    Without the thread, an unreachable store would block the caller for minutes, until TCP gives up.

    Args:
        seconds: Time limit. Each suspension of this process (SIGSTOP), however long, counts as at
            most 1/20 of the limit.
        function: Function to call. At the time limit its thread is abandoned.

    Raises:
        RuntimeError: ``function`` raised it, or it is a NoAnswerError: the time limit has passed.
    """
    slices = iter(range(_SLICES - 1))

    def poll() -> None:
        if next(slices, None) is None:
            raise NoAnswerError(f"no answer within {seconds:g} s")

    return call_in_thread(function, name="store", poll=poll, interval_seconds=seconds / _SLICES)


def polls(first_seconds: float, longest_seconds: float) -> Iterator[None]:
    """Yield at once, and then again after pauses that double from the first to the longest."""
    pause = first_seconds
    while True:
        yield
        time.sleep(pause)
        pause = min(2 * pause, longest_seconds)


class KeyPoll:
    """Checks in a background thread, at most once per interval, whether a store has a key.

    Args:
        store: Store of ``torch.distributed``.
        key: Key to look for.
        interval_seconds: Least time between two checks (> 0).

    Attributes:
        store_lost: True once an access has failed or ``close`` was called. No checks follow.
    """

    def __init__(self, store: Any, key: str, interval_seconds: float) -> None:
        self._store, self._key, self._interval_seconds = store, key, interval_seconds
        self.store_lost = False
        self._found = False
        self._checking = threading.Lock()  # held while a check runs
        self._last_check = time.monotonic()

    def found(self) -> bool:
        """Return True if a check has found the key. Starts a check if one is due. Never blocks."""
        now = time.monotonic()
        due = now - self._last_check > self._interval_seconds
        if due and not (self._found or self.store_lost) and self._checking.acquire(blocking=False):
            self._last_check = now
            try:
                threading.Thread(target=self._check, name="key poll", daemon=True).start()
            except RuntimeError:  # the interpreter is shutting down
                self._checking.release()
        return self._found

    def close(self) -> None:
        """Stop polling, and wait at most a second for a running check.

        At exit, Python would abort if a thread were inside the store.
        """
        self.store_lost = True
        if self._checking.acquire(timeout=_CLOSE_SECONDS):
            self._checking.release()

    def _check(self) -> None:
        try:
            self._found = bool(self._store.check([self._key]))
        except RuntimeError:
            self.store_lost = True
        finally:
            self._checking.release()
