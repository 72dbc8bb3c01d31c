"""Counting what a worker sends and how long it waits, around any communicator."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from typing_extensions import override

from offbeat.transport.communicator import Communicator, Wrapper
from offbeat.transport.handle import Handle
from offbeat.transport.operation import Operation

T = TypeVar("T")


class Account:
    """What has been counted.

    Args:
        carriers: How many workers hand over the same tensors, of which each carries an equal part.

    Attributes:
        wait_seconds: Time spent blocked in ``Handle.wait``.
        before_waiting: Called with the handle of each collective that is about to be waited for.
            Not of messages, which two workers exchange while the others are anywhere.
    """

    def __init__(self, carriers: int = 1) -> None:
        self._carriers, self._handed = carriers, 0
        self.wait_seconds = 0.0
        self.before_waiting: list[Callable[[Handle[Any]], None]] = []
        self._paused = False

    @property
    def payload_bytes(self) -> int:
        """Bytes of the tensors handed to operations, as far as this worker carries them.

        A gathered or broadcast tensor counts once; what is received does not count.
        """
        return self._handed // self._carriers

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing inside: set-up and evaluation are not training."""
        previous, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = previous

    def sent(self, payload_bytes: int) -> None:
        """Add bytes, which this worker hands over now or later."""
        if not self._paused:
            self._handed += payload_bytes

    def waited(self, seconds: float) -> None:
        """Add seconds of waiting."""
        if not self._paused:
            self.wait_seconds += seconds


class Accounting(Wrapper):
    """A communicator that counts on an ``account``, its own unless one is given.

    ``inner`` is for what happens beside the worker, whose bytes and waits are not the training's.
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
        self._handle, self._fabric, self._collective = handle, communicator, collective

    @override
    def done(self) -> bool:
        return self._handle.done()

    @override
    def wait(self) -> T:
        account, now = self._fabric.account, self._fabric.host.now
        if self._collective:
            for callback in account.before_waiting:
                callback(self._handle)
        start = now()
        try:
            return self._handle.wait()
        finally:
            account.waited(now() - start)
