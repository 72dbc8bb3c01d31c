"""An operation under way, and what it may end in."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar

from typing_extensions import override

from offbeat.errors import CommunicationError

T = TypeVar("T")
U = TypeVar("U")


class Handle(ABC, Generic[T]):
    """An operation under way."""

    @abstractmethod
    def done(self) -> bool:
        """Whether ``wait`` would return at once. Never blocks.

        Of a message (``send``, ``receive``) a backend may know only once it was waited for; gloo
        is one.
        """

    @abstractmethod
    def wait(self) -> T:
        """Block until the operation has ended and return its result.

        Raises:
            CommunicationError: the operation failed; the message names operation, rank, seconds
                waited, the ranks that did not answer, and ``timeout_seconds`` when that ran out.
        """

    def then(self, function: Callable[[T], U]) -> "Handle[U]":
        """The same operation with ``function`` applied to its result, once."""
        return _Then(self, function)


class _Then(Handle[U]):
    def __init__(self, handle: Handle[T], function: Callable[[T], U]) -> None:
        self._source: tuple[Handle[T], Callable[[T], U]] | None = (handle, function)
        self._result: list[U] = []

    @override
    def done(self) -> bool:
        return self._source is None or self._source[0].done()

    @override
    def wait(self) -> U:
        if self._source is not None:
            handle, function = self._source
            self._result.append(function(handle.wait()))
            self._source = None  # it may hold much, and this handle may be kept for long
        return self._result[0]


class Completed(Handle[T]):
    """An operation that has already ended with ``result``."""

    def __init__(self, result: T) -> None:
        self._result = result

    @override
    def done(self) -> bool:
        return True

    @override
    def wait(self) -> T:
        return self._result


class UnexplainedError(CommunicationError):
    """An operation of an activity beside the worker failed; the worker can find out why."""

    @abstractmethod
    def explain(self) -> CommunicationError:
        """The error to raise, which names who is missing. To be called by the worker itself."""


def explained(error: Exception) -> Exception:
    """What the worker should raise for an ``error`` that has ended an activity beside it."""
    return error.explain() if isinstance(error, UnexplainedError) else error
