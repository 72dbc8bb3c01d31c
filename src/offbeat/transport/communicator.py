"""The communicator: the interface through which a worker exchanges tensors with the others.

An operation (a sum, a broadcast, a message, …) is described by an ``Operation`` object.
``Communicator.start`` starts it and returns a ``Handle``. ``Handle.wait`` blocks until the
operation has ended. In between, the worker can compute. A *collective* is an operation in which all
workers take part. On one communicator all workers start the same collectives in the same order.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar, final

import torch
from torch import Tensor
from typing_extensions import override

from offbeat.errors import OffbeatError
from offbeat.transport.board import Board
from offbeat.transport.handle import Handle
from offbeat.transport.host import Host, Promise
from offbeat.transport.operation import (
    Await,
    Broadcast,
    Exchange,
    Gather,
    Maximum,
    Operation,
    Receive,
    Send,
    Sum,
)

T = TypeVar("T")


class Communicator(ABC):
    """Starts operations between the workers of one group.

    Tensors are one-dimensional and contiguous. In one operation they have the same shape and dtype
    on all workers. The order of additions in a sum is unspecified, but all workers receive
    bit-identical results.

    A subclass implements ``start``, ``twin`` and ``close`` and sets the attributes below. Most of
    the other methods are shorthands: ``sum(x, what="…")`` is ``start(Sum(tensor=x, what="…"))``.
    ``operation.py`` describes their arguments; ``what`` names the operation in error messages.

    Attributes:
        rank: Rank of this worker, from 0 to ``size`` - 1.
        size: Number of workers.
        timeout_seconds: Time limit of an operation, except those started with ``patient=True``.
        host: Clock and background threads of this worker.
        membership: The ``Membership`` of the communicator's view (``transport/membership.py``);
            None if the training is not elastic.
    """

    rank: int
    size: int
    timeout_seconds: float
    host: Host
    membership: Any = None  # its type would make the imports circular

    @property
    def control_device(self) -> torch.device:
        """Device for small tensors that are not model data, such as votes and lengths."""
        return torch.device("cpu")

    @abstractmethod
    def start(self, operation: Operation[T]) -> Handle[T]:
        """Start ``operation`` and return its handle."""

    @abstractmethod
    def twin(self) -> "Communicator":
        """Return a second communicator between the same workers. A collective.

        Each communicator has its own order of operations. So two threads of a worker can each use
        one of them.
        """

    @abstractmethod
    def close(self, *, together: bool = False) -> None:
        """Release connections, threads and descriptors, including those of all twins.

        Operations that have not ended fail, here and on the other workers that take part in them.
        A second call has no effect.

        Args:
            together: True if all workers close and all operations have ended. The call is then a
                collective: the workers wait for each other, so that none sees a broken connection.
        """

    def board(self, name: str) -> Board:
        """Open the board ``name``: a key-value store that the workers of this training share.

        Every worker opens the same boards in the same order. In elastic training a board outlives
        the view, and workers that join later open it, too.

        Raises:
            OffbeatError: This kind of communicator has no board.
        """
        raise OffbeatError(f"a {type(self).__name__} has no board, so workers cannot lease data")

    @final
    def sum(self, tensor: Tensor, *, what: str) -> Handle[Tensor]:
        """Start replacing ``tensor`` by its sum over the workers."""
        return self.start(Sum(what=what, tensor=tensor))

    @final
    def maximum(self, tensor: Tensor, *, what: str) -> Handle[Tensor]:
        """Start replacing ``tensor`` by its elementwise maximum over the workers."""
        return self.start(Maximum(what=what, tensor=tensor))

    @final
    def broadcast(self, tensor: Tensor, *, source: int = 0, what: str) -> Handle[Tensor]:
        """Start replacing ``tensor`` by the tensor of worker ``source``."""
        return self.start(Broadcast(what=what, tensor=tensor, source=source))

    @final
    def gather(self, tensor: Tensor, *, what: str) -> Handle[list[Tensor]]:
        """Start an all-gather: the result lists every worker's ``tensor`` in rank order."""
        return self.start(Gather(what=what, tensor=tensor))

    @final
    def gather_numbers(self, numbers: Sequence[float], *, what: str) -> Handle[list[list[float]]]:
        """Start an all-gather in float64: the result lists every worker's numbers in rank order."""
        own = torch.tensor(numbers, dtype=torch.float64, device=self.control_device)
        return self.gather(own, what=what).then(lambda rows: [row.tolist() for row in rows])

    @final
    def exchange(self, tensor: Tensor, *, what: str) -> Handle[Tensor]:
        """Start an all-to-all: send chunk k of ``tensor`` to worker k."""
        return self.start(Exchange(what=what, tensor=tensor))

    @final
    def send(self, tensor: Tensor, *, destination: int, tag: int = 0, what: str) -> Handle[Tensor]:
        """Start sending ``tensor`` to one worker."""
        return self.start(Send(what=what, tensor=tensor, destination=destination, tag=tag))

    @final
    def receive(
        self, tensor: Tensor, *, source: int, tag: int = 0, what: str, patient: bool = False
    ) -> Handle[Tensor]:
        """Start receiving a message into ``tensor``; see ``operation.Receive``."""
        return self.start(
            Receive(what=what, tensor=tensor, source=source, tag=tag, patient=patient)
        )

    @final
    def await_promise(self, promise: Promise[T], *, what: str, patient: bool = False) -> Handle[T]:
        """Return a handle that waits until another thread of this worker fulfils ``promise``."""
        return self.start(Await(what=what, promise=promise, patient=patient))

    @final
    def gather_bytes(self, payload: bytes, *, what: str) -> list[bytes]:
        """Return every worker's ``payload`` in rank order. Lengths may differ.

        A collective. Blocks.
        """
        device = self.control_device
        length = torch.tensor([len(payload)], dtype=torch.int64, device=device)
        lengths = [int(n.item()) for n in self.gather(length, what=what).wait()]
        padded = torch.zeros(max([*lengths, 1]), dtype=torch.uint8, device="cpu")
        padded[: len(payload)] = torch.frombuffer(bytearray(payload or b"\0"), dtype=torch.uint8)[
            : len(payload)
        ]
        received = self.gather(padded.to(device), what=what).wait()
        return [
            bytes(t.cpu().numpy().tobytes()[:n]) for t, n in zip(received, lengths, strict=True)
        ]


class Wrapper(Communicator):
    """Base class of communicators that change or observe the operations of ``inner``.

    A subclass overrides ``start``. It also overrides ``twin`` if twins must be wrapped, too.
    """

    def __init__(self, inner: Communicator) -> None:
        self.inner = inner
        self.rank, self.size, self.host = inner.rank, inner.size, inner.host
        self.timeout_seconds = inner.timeout_seconds

    @property
    @override
    def control_device(self) -> torch.device:
        return self.inner.control_device

    @override
    def start(self, operation: Operation[T]) -> Handle[T]:
        return self.inner.start(operation)

    @override
    def twin(self) -> Communicator:
        return self.inner.twin()

    @override
    def board(self, name: str) -> Board:
        return self.inner.board(name)

    @override
    def close(self, *, together: bool = False) -> None:
        self.inner.close(together=together)


class Transport(Protocol):
    """Factory of communicators. ``attach(group=…)`` accepts it in place of a process group.

    The simulator provides one, and workers that gather at a store use another.
    """

    def make_communicator(self, timeout_seconds: float) -> Communicator:
        """Open a communicator, in which this is the time limit of an operation. A collective."""
