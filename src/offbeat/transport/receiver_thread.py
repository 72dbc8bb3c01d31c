"""A thread that waits for messages in the worker's place, so that a Ctrl-C gets through.

Python delivers a signal only between two of its own instructions, and a wait inside gloo is one.
A collective is waited for in slices instead: it lives on when the time of a slice has passed. A
message does not, and gloo does not say whether one has come.
"""

import queue
import threading
from collections.abc import Callable

SLICE_SECONDS = 0.1  # how long a signal may wait
_LOST_SECONDS = 0.5  # for a thread that gloo does not let go of
ENDED = "the connections have ended"

_Job = tuple[Callable[[], object], list[RuntimeError], threading.Lock]


class Waiter:
    """Waits for the main thread, one message after the other. The thread starts when needed."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lost = False  # whether it waits for what has ended

    def wait(self, wait: Callable[[], object], between: Callable[[], bool]) -> None:
        """Call ``wait`` in the thread, and ``between`` now and then, until that is true.

        Raises:
            RuntimeError: as ``wait``, or because of ``between``.
        """
        if self._thread is None:
            self._thread = threading.Thread(
                target=_work_off, args=(self._jobs,), name="messages", daemon=True
            )
            self._thread.start()
        errors: list[RuntimeError] = []
        ended = threading.Lock()
        ended.acquire()
        self._jobs.put((wait, errors, ended))
        while not ended.acquire(timeout=SLICE_SECONDS):
            if between():
                self._lost = True
                raise RuntimeError(ENDED)
        if errors:
            raise errors.pop()

    def close(self, seconds: float) -> None:
        """End the thread, which may take so many ``seconds``."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(min(seconds, _LOST_SECONDS) if self._lost else seconds)


def needs_waiter() -> bool:
    """Whether signals are delivered to the thread that asks."""
    return threading.current_thread() is threading.main_thread()


def _work_off(jobs: "queue.SimpleQueue[_Job | None]") -> None:
    while (job := jobs.get()) is not None:
        wait, errors, ended = job
        try:
            wait()
        except RuntimeError as error:
            error.__traceback__ = None  # it would keep what was waited for
            errors.append(error)
        del job, wait, errors  # likewise, until the next one comes
        ended.release()
