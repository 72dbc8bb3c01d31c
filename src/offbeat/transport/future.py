"""Futures: the objects with which a worker waits for an operation that it has started.

Operations are sums over the workers, messages and the like; see ``transport/communicator.py``.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, TypeVar, final

from typing_extensions import override

from offbeat.errors import CommunicationError
from offbeat.transport.host import Promise

T = TypeVar("T")
U = TypeVar("U")
SLICE_SECONDS = 0.1
"""Longest time for which the main thread blocks without handling signals such as Ctrl-C."""


class Future(ABC, Generic[T]):
    """An operation that was started."""

    @abstractmethod
    def done(self) -> bool:
        """Return True if the operation has ended or failed. Never blocks.

        For a message (send or receive) over gloo, it returns False until ``wait`` has returned.
        """

    @abstractmethod
    def wait(self) -> T:
        """Block until the operation has ended, and return its result.

        For a collective with NCCL inside a node, only the current CUDA stream waits: the method may
        return before the collective has ended.

        Raises:
            CommunicationError: The operation failed, or the communicator was closed.
            CommunicationTimeout: This or an earlier operation exceeded ``timeout_seconds``.
        """

    def then(self, function: Callable[[T], U]) -> "Future[U]":
        """Return a future with the result ``function(self.wait())``, computed on the first wait."""
        return _Then(self, function)


class _Then(Future[U]):
    def __init__(self, future: Future[T], function: Callable[[T], U]) -> None:
        self._source: tuple[Future[T], Callable[[T], U]] | None = (future, function)
        self._result: list[U] = []

    @override
    def done(self) -> bool:
        return self._source is None or self._source[0].done()

    @override
    def wait(self) -> U:
        if self._source is not None:
            future, function = self._source
            self._result.append(function(future.wait()))
            self._source = None  # frees the tensors of the inner future
        return self._result[0]


class Operation(Future[T]):
    """An operation in progress. A subclass implements ``done`` and ``block``.

    Attributes:
        communicator: Communicator that counts the waits; None: they are not counted.
    """

    communicator: Any = None  # its type would make the imports circular

    @final
    @override
    def wait(self) -> T:
        if self.communicator is None:
            return self.block()
        with self.communicator.waiting():
            return self.block()

    @abstractmethod
    def block(self) -> T:
        """Block until the operation has ended, and return its result; see ``wait``."""


class Completed(Operation[T]):
    """An operation that has already ended."""

    def __init__(self, result: T) -> None:
        self._result = result

    @override
    def done(self) -> bool:
        return True

    @override
    def block(self) -> T:
        return self._result


class PromiseWait(Operation[T]):
    """A wait for a promise between threads.

    Args:
        promise: The promise, made by a ``ThreadHost``.
        check: Function that is called every 0.1 s with the duration of the wait in seconds. It
            raises an error if the wait must end.
    """

    def __init__(self, promise: Promise[T], check: Callable[[float], None]) -> None:
        self._promise, self._check = promise, check

    @override
    def done(self) -> bool:
        return self._promise.fulfilled

    @override
    def block(self) -> T:
        started = time.perf_counter()
        while not self._promise.wait(SLICE_SECONDS, "a promise"):
            self._check(time.perf_counter() - started)
        return self._promise.result


class UnexplainedError(CommunicationError):
    """An operation of a background thread failed, and the cause is not known yet.

    Finding the cause means checking which workers still run. Only the training thread may do so: it
    calls ``explain`` when it learns of the failure.

    Attributes:
        explain: Function that finds the cause, and returns the error to raise. Blocks.
    """

    def __init__(self, text: str, explain: Callable[[], CommunicationError]) -> None:
        super().__init__(text)
        self.explain = explain


def explained(error: Exception) -> Exception:
    """Return the error that the training thread should raise for a background thread's error.

    Blocks for an ``UnexplainedError``.
    """
    return error.explain() if isinstance(error, UnexplainedError) else error
