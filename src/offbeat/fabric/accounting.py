"""Counting what a worker sends and how long it waits, around any communicator."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from offbeat.fabric.communicator import Communicator, Handle, Promise

T = TypeVar("T")


class _Timed(Handle[T]):
    """A handle whose blocking time is added to the account."""

    def __init__(self, handle: Handle[T], account: "Accounting", *, message: bool = False) -> None:
        self._handle, self._account, self._message = handle, account, message

    def done(self) -> bool:
        return self._handle.done()

    def wait(self) -> T:
        if not self._message:
            self._account.before_waiting(self._handle)
        start = self._account.now()
        try:
            return self._handle.wait()
        finally:
            self._account.waited(self._account.now() - start)


class Accounting(Communicator):
    """A communicator that counts.

    ``payload_bytes`` are the bytes of the tensors handed to operations (a gathered or broadcast
    tensor counts once; what is received does not count). ``wait_seconds`` is the time spent
    blocked in ``Handle.wait``.

    Attributes:
        before_waiting: Called with each handle that is about to be waited for, but those of
            messages, which two workers exchange while the others are anywhere.
    """

    def __init__(self, inner: Communicator) -> None:
        self._inner = inner
        self.rank, self.size = inner.rank, inner.size
        self.overlaps_backward = inner.overlaps_backward
        self.timeout_seconds = inner.timeout_seconds
        self.payload_bytes = 0
        self.wait_seconds = 0.0
        self.before_waiting: Callable[[Handle[Any]], None] = lambda _: None
        self._paused = False

    @property
    def control_device(self) -> torch.device:
        """That of the wrapped communicator."""
        return self._inner.control_device

    @property
    def background(self) -> Communicator:
        """The wrapped communicator: what happens beside the worker is not counted."""
        return self._inner.background

    def waited(self, seconds: float) -> None:
        """Add ``seconds`` of waiting."""
        if not self._paused:
            self.wait_seconds += seconds

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing inside: set-up and evaluation are not training."""
        previous, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = previous

    def count(self, payload_bytes: int) -> None:
        """Add ``payload_bytes``, which this worker hands over now or later."""
        if not self._paused:
            self.payload_bytes += payload_bytes

    def _count(
        self, tensor: Tensor, start: Callable[[], Handle[T]], *, message: bool = False
    ) -> Handle[T]:
        self.count(tensor.nbytes)
        return _Timed(start(), self, message=message)

    def computed(self) -> None:
        """As the wrapped communicator; computing is not waiting."""
        self._inner.computed()

    def watch(self, totals: Callable[[], object]) -> None:
        """As the wrapped communicator."""
        self._inner.watch(totals)

    def now(self) -> float:
        """Seconds on the wrapped communicator's clock."""
        return self._inner.now()

    def sum(self, tensor: Tensor, *, what: str) -> Handle[Tensor]:
        """As the wrapped communicator, counted."""
        return self._count(tensor, lambda: self._inner.sum(tensor, what=what))

    def maximum(self, tensor: Tensor, *, what: str) -> Handle[Tensor]:
        """As the wrapped communicator, counted."""
        return self._count(tensor, lambda: self._inner.maximum(tensor, what=what))

    def broadcast(self, tensor: Tensor, *, source: int = 0, what: str) -> Handle[Tensor]:
        """As the wrapped communicator; counted at the source only."""
        payload = tensor if self.rank == source else tensor[:0]
        return self._count(payload, lambda: self._inner.broadcast(tensor, source=source, what=what))

    def gather(self, tensor: Tensor, *, what: str) -> Handle[list[Tensor]]:
        """As the wrapped communicator, counted."""
        return self._count(tensor, lambda: self._inner.gather(tensor, what=what))

    def send(self, tensor: Tensor, *, destination: int, tag: int = 0, what: str) -> Handle[Tensor]:
        """As the wrapped communicator, counted."""
        return self._count(
            tensor,
            lambda: self._inner.send(tensor, destination=destination, tag=tag, what=what),
            message=True,
        )

    def receive(
        self, tensor: Tensor, *, source: int, tag: int = 0, what: str, patient: bool = False
    ) -> Handle[Tensor]:
        """As the wrapped communicator; only the wait counts."""
        return self._count(
            tensor[:0],
            lambda: self._inner.receive(tensor, source=source, tag=tag, what=what, patient=patient),
            message=True,
        )

    def exchange(self, tensor: Tensor, *, what: str) -> Handle[Tensor]:
        """As the wrapped communicator, counted."""
        return self._count(tensor, lambda: self._inner.exchange(tensor, what=what))

    def twin(self) -> Communicator:
        """A twin whose operations count here."""
        return _Twin(self._inner.twin(), self)

    def spawn(self, activity: Callable[[], None], *, what: str) -> None:
        """As the wrapped communicator."""
        self._inner.spawn(activity, what=what)

    def close(self) -> None:
        """As the wrapped communicator."""
        self._inner.close()

    def explain(self, error: Exception) -> Exception:
        """As the wrapped communicator."""
        return self._inner.explain(error)

    def promise(self, *, what: str) -> Promise[T]:
        """As the wrapped communicator, its wait counted."""
        return _TimedPromise(self._inner.promise(what=what), self)


class _TimedPromise(Promise[T]):
    """A promise whose blocking time is added to the account."""

    def __init__(self, promise: Promise[T], account: Accounting) -> None:
        self._promise, self._timed = promise, _Timed(promise, account, message=True)

    def fulfil(self, result: T) -> None:
        self._promise.fulfil(result)

    def done(self) -> bool:
        return self._promise.done()

    def wait(self) -> T:
        return self._timed.wait()


class _Twin(Accounting):
    """The twin of a communicator: it counts on that one's account."""

    def __init__(self, inner: Communicator, account: Accounting) -> None:
        self._account = account
        super().__init__(inner)

    def waited(self, seconds: float) -> None:
        self._account.waited(seconds)

    def _count(
        self, tensor: Tensor, start: Callable[[], Handle[T]], *, message: bool = False
    ) -> Handle[T]:
        return self._account._count(tensor, start, message=message)
