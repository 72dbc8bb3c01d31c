"""The communicator: the interface through which a worker exchanges tensors with the others.

An operation (a sum, a broadcast, a message, …) is described by an ``Operation`` object.
``Communicator.start`` starts it and returns a ``Handle``. The worker can compute until it calls
``Handle.wait``, which blocks until the operation has ended. A *collective* is an operation in which
all workers take part. On one communicator all workers start the same collectives in the same order.
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
    """Starts operations between the workers of one group.

    Tensors are one-dimensional and contiguous. In one operation they have the same shape and dtype
    on all workers. The terms of a sum are added in an unspecified order, but all workers receive
    bit-identical results.

    A subclass implements ``start``, ``twin`` and ``close`` and sets the attributes below. Most of
    the other methods are shorthands: ``sum(x, what="…")`` is ``start(Sum(tensor=x, what="…"))``.

    Attributes:
        rank: Rank of this worker, from 0 to ``size`` - 1.
        size: Number of workers.
        timeout_seconds: Time limit of an operation that is not ``patient``.
        host: Clock and background threads of this worker.
    """

    rank: int
    size: int
    timeout_seconds: float
    host: Host

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

        Operations of the two communicators never mix. So two threads of a worker can each use one
        communicator, without a common order of operations.
        """

    @abstractmethod
    def close(self, *, together: bool = False) -> None:
        """Release connections, threads and descriptors, including those of all twins.

        Operations that have not ended fail, on this worker and on the workers that take part in
        them. A second call has no effect.

        Args:
            together: True if all workers close and all operations have ended. The call is then a
                collective: the workers wait for each other, so that none sees a broken connection.
        """

    @final
    def sum(self, tensor: Tensor, *, what: str, tail: int = 0) -> Handle[Tensor]:
        """Start replacing ``tensor`` by its sum over the workers.

        Args:
            tensor: Summed in place.
            what: Name of the operation in error messages.
            tail: Number of elements at the end of ``tensor`` that are not model data. Used only to
                count bytes in simulations in which one element represents many; see ``Host.scale``.
        """
        return self.start(Sum(what=what, tensor=tensor, tail=tail))

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
    def exchange(self, tensor: Tensor, *, what: str) -> Handle[Tensor]:
        """Start an all-to-all: send chunk k of ``tensor`` to worker k; see ``operation.Exchange``.

        The result is a new tensor that consists of the chunks received, in rank order.
        """
        return self.start(Exchange(what=what, tensor=tensor))

    @final
    def send(self, tensor: Tensor, *, destination: int, tag: int = 0, what: str) -> Handle[Tensor]:
        """Start sending ``tensor`` to one worker."""
        return self.start(Send(what=what, tensor=tensor, destination=destination, tag=tag))

    @final
    def receive(
        self, tensor: Tensor, *, source: int, tag: int = 0, what: str, patient: bool = False
    ) -> Handle[Tensor]:
        """Start receiving a message of worker ``source`` into ``tensor``.

        Args:
            tensor: Overwritten with the message.
            source: Rank of the sender.
            tag: The ``tag`` with which the sender sends the message.
            what: Name of the operation in error messages.
            patient: True to wait without a time limit, as a server does for requests.
        """
        return self.start(
            Receive(what=what, tensor=tensor, source=source, tag=tag, patient=patient)
        )

    @final
    def await_promise(self, promise: Promise[T], *, what: str, patient: bool = False) -> Handle[T]:
        """Return a handle that waits for another thread of this worker to fulfil ``promise``.

        Args:
            promise: Promise to wait for.
            what: Name of the operation in error messages.
            patient: True to wait without a time limit, as background threads do.
        """
        return self.start(Await(what=what, promise=promise, patient=patient))

    @final
    def gather_bytes(self, payload: bytes, *, what: str) -> list[bytes]:
        """Return every worker's ``payload`` in rank order. Lengths may differ.

        A collective. Blocks.
        """
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
    """Base class of communicators that change or observe the operations of another communicator.

    A subclass overrides ``start``. It also overrides ``twin`` if twins must be wrapped, too.

    Args:
        inner: Communicator that carries out the operations.
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
    """Factory of communicators. ``attach(group=…)`` accepts it in place of a process group.

    The simulator and ``offbeat.join`` provide transports. Tests use transports that inject faults.
    """

    def make_communicator(self, timeout_seconds: float) -> Communicator:
        """Open a new communicator between the workers. A collective.

        Args:
            timeout_seconds: Time limit of one operation.
        """
