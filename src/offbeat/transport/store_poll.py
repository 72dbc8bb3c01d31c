"""Background polling of a key in a store, for loops that must not block."""

import threading
import time
from typing import Any

_CLOSE_SECONDS = (
    1.0  # time for the last check to end; a store on an unreachable host may take longer
)


class KeyPoll:
    """Checks in a background thread, at most once per interval, if a key exists in a store.

    Args:
        store: Store of ``torch.distributed``.
        key: Key to look for.
        interval_seconds: Least time between two checks (> 0).

    Attributes:
        store_lost: True once the store has failed. It is then not asked again.
    """

    def __init__(self, store: Any, key: str, interval_seconds: float) -> None:
        self._store, self._key, self._interval_seconds = store, key, interval_seconds
        self.store_lost = False
        self._found = False
        self._thread: threading.Thread | None = None
        self._last_check = time.monotonic()

    def found(self) -> bool:
        """Return True if the key is known to exist. Starts a check if one is due. Never blocks."""
        now = time.monotonic()
        idle = self._thread is None or not self._thread.is_alive()
        due = now - self._last_check > self._interval_seconds
        if idle and due and not self._found and not self.store_lost:
            self._last_check = now
            self._thread = threading.Thread(target=self._check, name="key poll", daemon=True)
            try:
                self._thread.start()
            except RuntimeError:  # the interpreter is shutting down
                self._thread = None
        return self._found

    def close(self) -> None:
        """Stop polling, and wait for a check: Python would abort with a thread inside the store."""
        self.store_lost = True
        if self._thread is not None:
            self._thread.join(_CLOSE_SECONDS)

    def _check(self) -> None:
        try:
            self._found = bool(self._store.check([self._key]))
        except RuntimeError:
            self.store_lost = True
