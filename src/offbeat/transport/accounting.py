"""Accounting: a communicator that counts the bytes it sends and the seconds it waits."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from typing_extensions import override

from offbeat.transport.communicator import Communicator, Wrapper
from offbeat.transport.handle import Handle
from offbeat.transport.operation import Operation

T = TypeVar("T")


class Account:
    """Totals of the bytes that this worker sent and of the time for which it waited.

    Attributes:
        payload_bytes: Bytes of the tensors that were passed to operations. A tensor counts once,
            however many workers receive it. A broadcast counts on its source only. Received tensors
            do not count.
        wait_seconds: Time for which this worker waited for others.
    """

    def __init__(self) -> None:
        self.payload_bytes = 0
        self.wait_seconds = 0.0
        self._paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Return a context in which nothing is counted, as during set-up and evaluation."""
        previous, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = previous

    def sent(self, payload_bytes: int) -> None:
        """Add to the bytes sent, unless counting is paused."""
        if not self._paused:
            self.payload_bytes += payload_bytes

    def waited(self, seconds: float) -> None:
        """Add to the waiting time, unless counting is paused."""
        if not self._paused:
            self.wait_seconds += seconds


class Accounting(Wrapper):
    """A communicator that counts the bytes and the waiting time of its operations.

    A twin (second communicator) adds to the same account. Background threads use ``inner`` instead,
    so that their waits are not counted.

    Args:
        inner: Communicator that carries out the operations.
        account: Totals to which the counts are added; None creates a new ``Account``.
        senders: Number of processes of one machine of which only one sends to other machines
            (≥ 1). Each of them counts 1/``senders`` of the bytes.
    """

    def __init__(
        self, inner: Communicator, account: Account | None = None, senders: int = 1
    ) -> None:
        super().__init__(inner)
        self.account = Account() if account is None else account
        self._senders = senders

    @override
    def start(self, operation: Operation[T]) -> Handle[T]:
        handle = self.inner.start(operation)
        self.account.sent(operation.sent_bytes(self.rank) // self._senders)
        return self.timed(handle)

    def timed(self, handle: Handle[T]) -> Handle[T]:
        """Return a handle of an operation that ``inner`` has started. Its waits are counted."""
        return _Timed(handle, self)

    @override
    def twin(self) -> "Accounting":
        return Accounting(self.inner.twin(), self.account, self._senders)


class _Timed(Handle[T]):
    def __init__(self, handle: Handle[T], communicator: Accounting) -> None:
        self._handle, self._communicator = handle, communicator

    @override
    def done(self) -> bool:
        return self._handle.done()

    @override
    def wait(self) -> T:
        account, now = self._communicator.account, self._communicator.host.now
        start = now()
        try:
            return self._handle.wait()
        finally:
            account.waited(now() - start)
