"""Handles of operations that have been started."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar

from typing_extensions import override

from offbeat.errors import CommunicationError

T = TypeVar("T")
U = TypeVar("U")


class Handle(ABC, Generic[T]):
    """An operation that has been started."""

    @abstractmethod
    def done(self) -> bool:
        """Return True if ``wait`` would return at once. Never blocks.

        A backend may report a message (``send``, ``receive``) as done only after ``wait``. Gloo
        does so.
        """

    @abstractmethod
    def wait(self) -> T:
        """Block until the operation has ended, and return its result.

        Raises:
            CommunicationError: The operation failed. The message names the operation, this rank,
                the elapsed seconds and the ranks that are missing, and mentions
                ``timeout_seconds`` if that ran out.
        """

    def then(self, function: Callable[[T], U]) -> "Handle[U]":
        """Return a handle whose result is ``function(self.wait())``, computed once."""
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
            self._source = None  # frees the tensors of the inner handle
        return self._result[0]


class Completed(Handle[T]):
    """The handle of an operation that has already ended with ``result``."""

    def __init__(self, result: T) -> None:
        self._result = result

    @override
    def done(self) -> bool:
        return True

    @override
    def wait(self) -> T:
        return self._result


class UnexplainedError(CommunicationError):
    """An operation of a background thread failed, and the cause is not known yet.

    Only the worker's own thread asks the peers, once, which of them are missing. It does so in
    ``explain``.
    """

    @abstractmethod
    def explain(self) -> CommunicationError:
        """Return the error to raise, which names the missing ranks. Call on the worker's thread."""


def explained(error: Exception) -> Exception:
    """Return the error that the worker should raise for one that ended a background thread."""
    return error.explain() if isinstance(error, UnexplainedError) else error
