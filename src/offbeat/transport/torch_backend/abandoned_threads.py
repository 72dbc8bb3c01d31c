"""Threads that are blocked in gloo or in a store, and that are left to themselves.

If such a thread returned from torch while Python shuts down, the process would abort with
"terminate called without an active exception". So Python waits for them at exit.
"""

import atexit
import threading
import time

_EXIT_SECONDS = 5.0  # time for which Python waits at exit for threads without a deadline

_abandoned: list[tuple[threading.Thread, float | None]] = []
"""Threads with their deadlines."""


def abandon_thread(thread: threading.Thread, deadline: float | None = None) -> None:
    """Let Python wait for ``thread`` at exit.

    Args:
        thread: The thread.
        deadline: End of that wait, by ``time.monotonic``. None: 5 s after its beginning.
    """
    _abandoned[:] = [(other, limit) for other, limit in _abandoned if other.is_alive()]
    _abandoned.append((thread, deadline))


@atexit.register
def _join_abandoned() -> None:
    end = time.monotonic() + _EXIT_SECONDS
    for thread, deadline in _abandoned:
        thread.join(max(0.0, (end if deadline is None else deadline) - time.monotonic()))
