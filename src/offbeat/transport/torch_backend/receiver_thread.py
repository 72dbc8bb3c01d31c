"""A thread that waits for messages on behalf of the main thread, so that Ctrl-C stays responsive.

Python runs signal handlers only between two bytecode instructions of the main thread. A wait that
blocks inside gloo delays them. For a collective the main thread repeats waits of 0.1 s, because a
collective continues after a wait has timed out. For a message this is impossible: a message whose
wait has timed out is lost, and gloo has no test for its arrival. Therefore a second thread blocks
on messages.
"""

import queue
import threading
from collections.abc import Callable

SLICE_SECONDS = 0.1  # longest delay of a signal
_STUCK_SECONDS = 0.5  # time limit of close() if gloo does not release the thread
CLOSED = "the connections are closed"

_Job = tuple[Callable[[], object], list[Exception], threading.Lock]


class ReceiverThread:
    """Runs blocking waits for the main thread, one at a time. Starts at the first wait."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stuck = False  # True if the thread may be blocked on a closed connection

    def wait(self, wait: Callable[[], object], poll: Callable[[], bool]) -> None:
        """Run ``wait`` in the thread and block until it has ended, or until ``poll`` returns True.

        ``poll`` is called periodically on the calling thread.

        Raises:
            RuntimeError: ``poll`` returned True.
            Exception: ``wait`` raised it.
        """
        if self._thread is None:
            self._thread = threading.Thread(
                target=_work, args=(self._jobs,), name="messages", daemon=True
            )
            self._thread.start()
        errors: list[Exception] = []
        done = threading.Lock()
        done.acquire()
        self._jobs.put((wait, errors, done))
        while not done.acquire(timeout=SLICE_SECONDS):
            if poll():
                self._stuck = True
                raise RuntimeError(CLOSED)
        if errors:
            raise errors.pop()

    def close(self, seconds: float) -> None:
        """End the thread. Wait at most ``seconds`` for its end, or 0.5 s if it may be stuck."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(min(seconds, _STUCK_SECONDS) if self._stuck else seconds)


def needs_receiver_thread() -> bool:
    """Return True on the main thread, to which Python delivers signals."""
    return threading.current_thread() is threading.main_thread()


def _work(jobs: "queue.SimpleQueue[_Job | None]") -> None:
    while (job := jobs.get()) is not None:
        wait, errors, done = job
        try:
            wait()
        except Exception as error:
            error.__traceback__ = None  # it would keep the operation alive
            errors.append(error)
        del job, wait, errors  # they would keep the operation alive until the next job
        done.release()
