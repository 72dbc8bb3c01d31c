"""Clock and background threads of a worker: real ones here, virtual ones in the simulator.

The host is separate from the communicator, because wrappers of a communicator count or break
operations and must leave clock and threads as they are.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar

from typing_extensions import override

T = TypeVar("T")


class Promise(ABC, Generic[T]):
    """A result that one thread of a worker passes to another; see ``operation.Await``."""

    @abstractmethod
    def fulfil(self, result: T) -> None:
        """Set the result. Called once."""

    @property
    @abstractmethod
    def fulfilled(self) -> bool:
        """True once the result is set."""

    @property
    @abstractmethod
    def result(self) -> T:
        """The result, after it was set."""


class Host(ABC):
    """Clock and background threads of one worker.

    Attributes:
        scale: Number of elements of the full model that one element of the exchanged model stands
            for (≥ 1). It is 1 unless a simulation uses placeholder tensors; see
            ``transport/placeholder_tensors.py``.
    """

    scale: float = 1.0

    @abstractmethod
    def now(self) -> float:
        """Return the time in seconds. The simulator returns virtual time."""

    @abstractmethod
    def sleep(self, seconds: float, what: str) -> None:
        """Let ``seconds`` pass on the calling thread; ``what`` names the pause in a timeline."""

    @abstractmethod
    def spawn(self, activity: Callable[[], None], *, what: str) -> None:
        """Run ``activity`` in a background thread named ``what``."""

    @abstractmethod
    def promise(self) -> Promise[T]:
        """Return a new promise between threads of this worker."""

    def computed(self, progress: float) -> None:  # noqa: B027 - needed in virtual time only
        """Report progress: the share of the current step that is computed, in (0, 1].

        A share of 1 ends the step.
        """

    def watch(self, totals: Callable[[], object]) -> None:  # noqa: B027 - as above
        """Register a function that returns the current totals of the training on this worker."""


class ThreadPromise(Promise[T]):
    """A promise between real threads."""

    def __init__(self) -> None:
        self._given = threading.Event()
        self._results: list[T] = []

    @override
    def fulfil(self, result: T) -> None:
        self._results.append(result)
        self._given.set()

    @property
    @override
    def fulfilled(self) -> bool:
        return self._given.is_set()

    @property
    @override
    def result(self) -> T:
        return self._results[0]

    def wait(self, seconds: float) -> bool:
        """Block until the promise is fulfilled, for at most ``seconds``. Return ``fulfilled``."""
        return self._given.wait(seconds)


class ThreadHost(Host):
    """Wall-clock time and daemon threads."""

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
        thread.start()

    @override
    def promise(self) -> ThreadPromise[T]:
        return ThreadPromise()

    @property
    def in_background(self) -> bool:
        """True if the calling thread was started by ``spawn``."""
        return threading.current_thread() in self._threads

    @property
    def active(self) -> list[threading.Thread]:
        """Background threads that have not ended."""
        return [thread for thread in self._threads if thread.is_alive()]
