"""The host of a worker: its clock and its background threads.

``Host`` is the interface. ``ThreadHost`` implements it with real time and threads. The simulator
implements it with *virtual time*, a number that the simulator advances.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar

from typing_extensions import override

from offbeat.errors import OffbeatError

T = TypeVar("T")


class Promise(Generic[T]):
    """A result that one thread of a worker will pass to another. ``Host.promise`` makes it.

    A worker that waits for other workers uses ``Communicator.await_promise``, which fails if one of
    them is lost. ``wait`` does not, so elastic training can use it between two steps.
    """

    def __init__(self) -> None:
        self._results: list[T] = []
        self._event = threading.Event()

    def fulfil(self, result: T) -> None:
        """Set the result. Called once."""
        self._results.append(result)
        self._event.set()

    def wait(self, seconds: float, what: str) -> bool:
        """Block until the promise is fulfilled, for ``seconds`` at most. True if it is fulfilled.

        ``what`` names the wait in a simulation's timeline. The simulator has no time limit: it
        reports a deadlock.
        """
        return self._event.wait(min(seconds, threading.TIMEOUT_MAX))

    @property
    def fulfilled(self) -> bool:
        """True once the result is set."""
        return bool(self._results)

    @property
    def result(self) -> T:
        """The result. Must not be read before ``fulfilled`` is True."""
        return self._results[0]


class Host(ABC):
    """Clock and background threads of one worker."""

    @abstractmethod
    def now(self) -> float:
        """Return the time in seconds since an arbitrary moment."""

    @abstractmethod
    def sleep(self, seconds: float, what: str) -> None:
        """Pause the calling thread. ``what`` names the pause in a simulation's timeline."""

    @abstractmethod
    def spawn(self, activity: Callable[[], None], *, what: str) -> None:
        """Run ``activity`` in a background thread named ``what``."""

    @property
    @abstractmethod
    def in_background(self) -> bool:
        """True if ``spawn`` of this host started the calling thread."""

    def processor_seconds(self) -> float:
        """Return the processor time of the calling thread. The simulator counts none."""
        return 0.0

    @abstractmethod
    def promise(self) -> Promise[T]:
        """Return a new promise between threads of this worker."""

    def computed(self, progress: float) -> None:  # noqa: B027 - optional
        """Report that a fraction of the current step's computation is done.

        The simulator advances virtual time accordingly. A real host does nothing.

        Args:
            progress: Fraction, in (0, 1]. 1 ends the step.
        """

    def register_totals(self, totals: Callable[[], object]) -> None:  # noqa: B027 - optional
        """Register a function that returns this worker's totals (bytes, waiting time, …).

        The simulator reports them for all workers. A real host does nothing.
        """


def start_thread(thread: threading.Thread) -> None:
    """Start a thread. Raises OffbeatError if the operating system allows no further one."""
    try:
        thread.start()
    except RuntimeError as error:
        remedy = "Raise the limit on threads (ulimit -u, or that of the container)"
        raise OffbeatError(f"{thread.name}: {error}. {remedy}") from None


class ThreadHost(Host):
    """A host with the real clock and daemon threads."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []

    @override
    def now(self) -> float:
        return time.perf_counter()

    @override
    def sleep(self, seconds: float, what: str) -> None:
        time.sleep(seconds)

    @override
    def spawn(self, activity: Callable[[], None], *, what: str) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=activity, name=what, daemon=True)
        self._threads.append(thread)
        start_thread(thread)

    @override
    def promise(self) -> Promise[T]:
        return Promise()

    @override
    def processor_seconds(self) -> float:
        return time.thread_time()

    @property
    @override
    def in_background(self) -> bool:
        return threading.current_thread() in self._threads

    @property
    def active(self) -> list[threading.Thread]:
        """Threads started by ``spawn`` that have not ended."""
        return [thread for thread in self._threads if thread.is_alive()]
