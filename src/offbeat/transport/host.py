"""What a worker runs on: its clock and its activities. Real ones here; the simulator has its own.

Apart from the communicator, because messages, clock and threads change independently: a wrapper
around a communicator counts or breaks operations and leaves the host as it is.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar

from typing_extensions import override

T = TypeVar("T")


class Promise(ABC, Generic[T]):
    """A result that one activity of a worker owes to another; see ``operation.Await``."""

    @abstractmethod
    def fulfil(self, result: T) -> None:
        """Give the result, once."""

    @property
    @abstractmethod
    def fulfilled(self) -> bool:
        """Whether it was given."""

    @property
    @abstractmethod
    def result(self) -> T:
        """What was given."""


class Host(ABC):
    """A worker's clock and activities.

    Attributes:
        scale: How many numbers one number of the model stands for; 1 unless a
            simulation exchanges placeholder tensors; see ``transport/placeholder_tensors.py``.
    """

    scale: float = 1.0

    @abstractmethod
    def now(self) -> float:
        """Seconds on this worker's clock (virtual ones in the simulator)."""

    @abstractmethod
    def sleep(self, seconds: float, what: str) -> None:
        """Let ``seconds`` pass for the running activity."""

    @abstractmethod
    def spawn(self, activity: Callable[[], None], *, what: str) -> None:
        """Run ``activity`` beside the worker, until it returns or the worker ends."""

    @abstractmethod
    def promise(self) -> Promise[T]:
        """A promise between activities of this worker."""

    def computed(self, progress: float) -> None:  # noqa: B027 - only virtual time must be told
        """This worker has computed so much of a step, in (0, 1]; 1 ends it."""

    def watch(self, totals: Callable[[], object]) -> None:  # noqa: B027 - likewise
        """``totals`` gives, at any time, the totals of the training that runs here."""


class ThreadPromise(Promise[T]):
    """A promise between threads."""

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
        """Block until it is fulfilled, for at most ``seconds``; whether it is."""
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
        """Whether the thread that asks was made by ``spawn``."""
        return threading.current_thread() in self._threads

    @property
    def active(self) -> list[threading.Thread]:
        """Threads that have not ended."""
        return [thread for thread in self._threads if thread.is_alive()]
