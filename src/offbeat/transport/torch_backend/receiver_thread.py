"""A thread that waits for messages on behalf of the main thread, so that Ctrl-C stays responsive.

Python handles Ctrl-C on the main thread, and only when that thread is not blocked inside gloo. For
a collective the main thread therefore repeats waits of 0.1 s, between which it handles Ctrl-C. This
is impossible for a message, because gloo loses a message when a wait for it times out. So a second
thread waits for the message without a pause, and the main thread waits for the second thread.
"""

import queue
import threading
from collections.abc import Callable

SLICE_SECONDS = 0.1
"""Longest time for which the main thread blocks without handling signals such as Ctrl-C."""

CLOSED = "the connections are closed"
"""Error text of a wait that was given up because the connections are closed."""

_STUCK_SECONDS = 0.5  # time limit of close() if the thread may be stuck in gloo

_Job = tuple[Callable[[], object], list[Exception], threading.Lock]
"""Function to call, list for its error, and lock that is released at its end."""


class ReceiverThread:
    """Runs blocking waits for the main thread, one at a time."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stuck = False  # True if the thread may be blocked on a closed connection

    def wait(self, wait: Callable[[], object], poll: Callable[[], bool]) -> None:
        """Call ``wait`` in the thread, and block until it has ended.

        Args:
            wait: Function that blocks until a message has arrived.
            poll: Function that is called every 0.1 s on the calling thread. It returns True to
                give up the wait.

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
        """End the thread. Blocks for at most ``seconds``, or 0.5 s if a wait was given up."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(min(seconds, _STUCK_SECONDS) if self._stuck else seconds)


def needs_receiver_thread() -> bool:
    """Return True on the main thread, which handles signals such as Ctrl-C."""
    return threading.current_thread() is threading.main_thread()


def _work(jobs: "queue.SimpleQueue[_Job | None]") -> None:
    while (job := jobs.get()) is not None:
        wait, errors, done = job
        try:
            wait()
        except Exception as error:
            error.__traceback__ = None  # the traceback would keep the operation alive
            errors.append(error)
        del job, wait, errors  # these would keep the operation alive until the next job
        done.release()
