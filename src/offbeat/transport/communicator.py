"""The seam between strategies and networks: operations are values, a communicator starts them.

Every operation is started by one call and finished by ``Handle.wait``, so that a strategy may do
other work in between. All workers start the same collective operations in the same order.
"""

from abc import ABC, abstractmethod
from typing import Protocol, TypeVar, final

import torch
from torch import Tensor
from typing_extensions import override

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
    """Operations between ``size`` workers, of which this one is ``rank``.

    Tensors are flat, contiguous and alike on all workers. Sums are exact in no particular order,
    but all workers receive bit-identical results.

    An implementation has ``start``, ``twin``, ``close`` and these attributes; what else is here is
    a shorter way to write ``start(Sum(…))`` and so on.

    Attributes:
        rank: This worker, from 0.
        size: How many workers there are.
        timeout_seconds: How long one operation may take.
        host: This worker's clock and activities.
    """

    rank: int
    size: int
    timeout_seconds: float
    host: Host

    @property
    def control_device(self) -> torch.device:
        """Where the small tensors that carry decisions must live."""
        return torch.device("cpu")

    @abstractmethod
    def start(self, operation: Operation[T]) -> Handle[T]:
        """Start ``operation``."""

    @abstractmethod
    def twin(self) -> "Communicator":
        """Another communicator of the same workers, with an order of operations of its own.

        A collective: all workers call it alike.
        """

    @abstractmethod
    def close(self, *, together: bool = False) -> None:
        """Give back connections, threads and descriptors, those of twins too.

        Operations under way fail, here and on the workers that still wait for this one. Calling
        it again does nothing.

        Args:
            together: All workers close, and nothing is under way: then no worker takes away what
                another is still receiving. Without it this is no collective.
        """

    @final
    def sum(self, tensor: Tensor, *, what: str, tail: int = 0) -> Handle[Tensor]:
        """Start replacing ``tensor`` by its sum over the workers; ``what`` names it in errors.

        ``tail``: see ``Host.scale``; the last numbers of ``tensor`` that are no model data.
        """
        return self.start(Sum(what=what, tensor=tensor, tail=tail))

    @final
    def maximum(self, tensor: Tensor, *, what: str) -> Handle[Tensor]:
        """Start replacing ``tensor`` by its elementwise maximum over the workers."""
        return self.start(Maximum(what=what, tensor=tensor))

    @final
    def broadcast(self, tensor: Tensor, *, source: int = 0, what: str) -> Handle[Tensor]:
        """Start replacing ``tensor`` by that of worker ``source``."""
        return self.start(Broadcast(what=what, tensor=tensor, source=source))

    @final
    def gather(self, tensor: Tensor, *, what: str) -> Handle[list[Tensor]]:
        """Start collecting every worker's ``tensor``, in rank order, on all workers."""
        return self.start(Gather(what=what, tensor=tensor))

    @final
    def exchange(self, tensor: Tensor, *, what: str) -> Handle[Tensor]:
        """Start an all-to-all; see ``operation.Exchange``."""
        return self.start(Exchange(what=what, tensor=tensor))

    @final
    def send(self, tensor: Tensor, *, destination: int, tag: int = 0, what: str) -> Handle[Tensor]:
        """Start sending ``tensor`` to one worker."""
        return self.start(Send(what=what, tensor=tensor, destination=destination, tag=tag))

    @final
    def receive(
        self, tensor: Tensor, *, source: int, tag: int = 0, what: str, patient: bool = False
    ) -> Handle[Tensor]:
        """Start filling ``tensor`` with a message; see ``operation.Receive``."""
        return self.start(
            Receive(what=what, tensor=tensor, source=source, tag=tag, patient=patient)
        )

    @final
    def fulfilment(self, promise: Promise[T], *, what: str, patient: bool = False) -> Handle[T]:
        """What another activity of this worker fulfils; see ``operation.Await``."""
        return self.start(Await(what=what, promise=promise, patient=patient))

    @final
    def gather_bytes(self, payload: bytes, *, what: str) -> list[bytes]:
        """Every worker's ``payload`` (of any length), in rank order. Blocks."""
        device = self.control_device
        length = torch.tensor([len(payload)], dtype=torch.int64, device=device)
        lengths = [int(n.item()) for n in self.gather(length, what=f"length of {what}").wait()]
        padded = torch.zeros(max([*lengths, 1]), dtype=torch.uint8)
        padded[: len(payload)] = torch.frombuffer(bytearray(payload or b"\0"), dtype=torch.uint8)[
            : len(payload)
        ]
        received = self.gather(padded.to(device), what=what).wait()
        return [
            bytes(t.cpu().numpy().tobytes()[:n]) for t, n in zip(received, lengths, strict=True)
        ]


class Wrapper(Communicator):
    """A communicator around another one, to be given a ``start`` of its own.

    Args:
        inner: The communicator that does the work.
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
    def close(self, *, together: bool = False) -> None:
        self.inner.close(together=together)


class Transport(Protocol):
    """What ``attach(group=…)`` takes besides a process group: workers reached in a way of its own.

    The simulator is one; so is a test that puts a fault between the workers.
    """

    def make_communicator(self, timeout_seconds: float) -> Communicator:
        """A communicator of its own for each caller, with ``timeout_seconds`` for an operation.

        A collective: all workers call it alike.
        """
