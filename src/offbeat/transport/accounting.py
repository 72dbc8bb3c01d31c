"""Accounting: bytes that a worker sends and seconds that it waits, around any communicator."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from typing_extensions import override

from offbeat.transport.communicator import Communicator, Wrapper
from offbeat.transport.handle import Handle
from offbeat.transport.operation import Operation

T = TypeVar("T")


class Account:
    """Totals of the bytes sent and the time waited.

    Args:
        carriers: Number of processes that pass the same tensors to their operations. Each of them
            sends an equal part (≥ 1).

    Attributes:
        wait_seconds: Time spent blocked in ``Handle.wait``.
        before_waiting: Functions called with the handle of a collective before the worker waits
            for it. They are not called for messages.
    """

    def __init__(self, carriers: int = 1) -> None:
        self._carriers, self._bytes = carriers, 0
        self.wait_seconds = 0.0
        self.before_waiting: list[Callable[[Handle[Any]], None]] = []
        self._paused = False

    @property
    def payload_bytes(self) -> int:
        """Bytes of the tensors passed to operations, divided by the number of carriers.

        A gathered or broadcast tensor counts once. Received tensors do not count.
        """
        return self._bytes // self._carriers

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Return a context in which nothing is counted, as during set-up and evaluation."""
        previous, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = previous

    def sent(self, payload_bytes: int) -> None:
        """Add bytes that this worker passes to operations."""
        if not self._paused:
            self._bytes += payload_bytes

    def waited(self, seconds: float) -> None:
        """Add seconds of waiting time."""
        if not self._paused:
            self.wait_seconds += seconds


class Accounting(Wrapper):
    """A communicator that counts bytes and waiting time.

    Background threads use ``inner``, so that their traffic does not count as that of training.

    Args:
        inner: Communicator that carries out the operations.
        account: Totals to add to; None creates new ones.
    """

    def __init__(self, inner: Communicator, account: Account | None = None) -> None:
        super().__init__(inner)
        self.account = Account() if account is None else account

    @override
    def start(self, operation: Operation[T]) -> Handle[T]:
        handle = self.inner.start(operation)
        self.account.sent(operation.sent_bytes(self.rank, self.host.scale))
        return _Timed(handle, self, operation.collective)

    @override
    def twin(self) -> "Accounting":
        return Accounting(self.inner.twin(), self.account)


class _Timed(Handle[T]):
    """A handle whose blocking time is added to the account."""

    def __init__(self, handle: Handle[T], communicator: Accounting, collective: bool) -> None:
        self._handle, self._communicator, self._collective = handle, communicator, collective

    @override
    def done(self) -> bool:
        return self._handle.done()

    @override
    def wait(self) -> T:
        account, now = self._communicator.account, self._communicator.host.now
        if self._collective:
            for callback in account.before_waiting:
                callback(self._handle)
        start = now()
        try:
            return self._handle.wait()
        finally:
            account.waited(now() - start)
