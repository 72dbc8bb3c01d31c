"""A thread that waits for messages on behalf of the main thread, so that Ctrl-C stays responsive.

Python delivers a signal only between two bytecode instructions, so a wait inside gloo delays it.
For a collective the main thread waits in short slices, which the collective survives. A message
does not survive the time-out of its wait, and gloo cannot tell if one has arrived, so a second
thread waits for messages.
"""

import queue
import threading
from collections.abc import Callable

SLICE_SECONDS = 0.1  # longest delay of a signal
_STUCK_SECONDS = 0.5  # time limit of close() if gloo does not release the thread
CLOSED = "the connections are closed"

_Job = tuple[Callable[[], object], list[RuntimeError], threading.Lock]


class ReceiverThread:
    """Runs blocking waits of the main thread one after the other. Starts at the first wait."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stuck = False  # True if the thread may be blocked on a closed connection

    def wait(self, wait: Callable[[], object], poll: Callable[[], bool]) -> None:
        """Run ``wait`` in the thread, and call ``poll`` periodically until one of them ends.

        Raises:
            RuntimeError: ``wait`` raised it, or ``poll`` returned True.
        """
        if self._thread is None:
            self._thread = threading.Thread(
                target=_work, args=(self._jobs,), name="messages", daemon=True
            )
            self._thread.start()
        errors: list[RuntimeError] = []
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
        """End the thread, and wait for it for at most ``seconds``."""
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
        except RuntimeError as error:
            error.__traceback__ = None  # it would keep the operation alive
            errors.append(error)
        del job, wait, errors  # they would keep the operation alive until the next job
        done.release()
