"""The communicator: the interface between strategies and networks.

A communicator starts operations, which are values. Each operation is started by one call and
completed by ``Handle.wait``, so that computation and communication can overlap. All workers start
the same collectives in the same order.
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
    """Operations between the workers of one group.

    Tensors are flat, contiguous, and have the same shape and dtype on all workers. The order in
    which a sum adds is unspecified, but all workers receive bit-identical results.

    An implementation provides ``start``, ``twin``, ``close`` and the attributes below. The other
    methods are shorthands such as ``sum(x)`` for ``start(Sum(tensor=x))``.

    Attributes:
        rank: Rank of this worker, from 0.
        size: Number of workers.
        timeout_seconds: Time limit of one operation.
        host: Clock and background threads of this worker.
    """

    rank: int
    size: int
    timeout_seconds: float
    host: Host

    @property
    def control_device(self) -> torch.device:
        """Device for the small tensors that carry decisions, as opposed to model data."""
        return torch.device("cpu")

    @abstractmethod
    def start(self, operation: Operation[T]) -> Handle[T]:
        """Start ``operation``."""

    @abstractmethod
    def twin(self) -> "Communicator":
        """Return a duplicate: the same workers, with an independent order of operations.

        A collective. Operations of the two communicators never mix, so that two threads can each
        use one of them.
        """

    @abstractmethod
    def close(self, *, together: bool = False) -> None:
        """Release connections, threads and descriptors, including those of all twins.

        Pending operations fail, on this worker and on the workers that wait for it. A second call
        has no effect.

        Args:
            together: True if all workers close and no operation is pending. The call is then a
                collective that closes no connection on which another worker is still receiving.
        """

    @final
    def sum(self, tensor: Tensor, *, what: str, tail: int = 0) -> Handle[Tensor]:
        """Start replacing ``tensor`` by its sum over the workers.

        Args:
            tensor: Summed in place.
            what: Name of the operation in error messages.
            tail: Number of elements at the end of ``tensor`` that are not model data; see
                ``Host.scale``.
        """
        return self.start(Sum(what=what, tensor=tensor, tail=tail))

    @final
    def maximum(self, tensor: Tensor, *, what: str) -> Handle[Tensor]:
        """Start replacing ``tensor`` by its elementwise maximum over the workers."""
        return self.start(Maximum(what=what, tensor=tensor))

    @final
    def broadcast(self, tensor: Tensor, *, source: int = 0, what: str) -> Handle[Tensor]:
        """Start replacing ``tensor`` by the one of worker ``source``."""
        return self.start(Broadcast(what=what, tensor=tensor, source=source))

    @final
    def gather(self, tensor: Tensor, *, what: str) -> Handle[list[Tensor]]:
        """Start an all-gather: the result lists every worker's ``tensor`` in rank order."""
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
        """Start receiving a message into ``tensor``; see ``operation.Receive``."""
        return self.start(
            Receive(what=what, tensor=tensor, source=source, tag=tag, patient=patient)
        )

    @final
    def await_promise(self, promise: Promise[T], *, what: str, patient: bool = False) -> Handle[T]:
        """Return a handle of the result of ``promise``; see ``operation.Await``."""
        return self.start(Await(what=what, promise=promise, patient=patient))

    @final
    def gather_bytes(self, payload: bytes, *, what: str) -> list[bytes]:
        """Return every worker's ``payload`` in rank order. Lengths may differ. Blocks."""
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
    """Base class of communicators that change or observe what another one starts.

    A subclass overrides ``start``, and ``twin`` if duplicates are to be wrapped as well.

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
    """Custom source of communicators, accepted by ``attach(group=…)`` in place of a process group.

    The simulator provides one. Tests use others to inject faults.
    """

    def make_communicator(self, timeout_seconds: float) -> Communicator:
        """Open a new communicator between the workers. A collective.

        Args:
            timeout_seconds: Time limit of one operation.
        """
