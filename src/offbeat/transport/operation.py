"""Operations between workers, as values that ``Communicator.start`` starts.

Because an operation is a value, code that concerns all of them (counting bytes, recording, failing
the k-th operation in a test) wraps a single method.
"""

from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

from torch import Tensor
from typing_extensions import override

from offbeat.transport.host import Promise
from offbeat.transport.placeholder_tensors import bytes_of

R = TypeVar("R")


@dataclass(frozen=True, eq=False, kw_only=True)
class Operation(Generic[R]):
    """An operation between workers whose result is an ``R``.

    Attributes:
        what: Name of the operation in error messages.
    """

    what: str

    collective: ClassVar[bool] = True
    """True if all workers start it, in the same order; False if it concerns one or two workers."""

    def sent_bytes(self, rank: int, scale: float = 1.0) -> int:
        """Return the payload of worker ``rank`` in bytes, where ``scale`` is ``Host.scale``."""
        return 0


@dataclass(frozen=True, eq=False, kw_only=True)
class _OnTensor(Operation[R]):
    """An operation on one tensor.

    Attributes:
        tensor: Input of this worker. Sums, maxima, broadcasts and receives also write to it.
        tail: Number of elements at its end that are not model data; see ``Host.scale``.
    """

    tensor: Tensor
    tail: int = 0

    @override
    def sent_bytes(self, rank: int, scale: float = 1.0) -> int:
        return bytes_of(self.tensor, scale, self.tail)


class Sum(_OnTensor[Tensor]):
    """Replace ``tensor`` by its sum over the workers."""


class Maximum(_OnTensor[Tensor]):
    """Replace ``tensor`` by its elementwise maximum over the workers."""


class Gather(_OnTensor[list[Tensor]]):
    """All-gather: list every worker's ``tensor`` in rank order, on all workers."""


class Exchange(_OnTensor[Tensor]):
    """All-to-all: split ``tensor`` into ``size`` equal chunks and send the k-th to worker k.

    The result is a new tensor of the same size, whose k-th chunk comes from worker k.
    """


@dataclass(frozen=True, eq=False, kw_only=True)
class Broadcast(_OnTensor[Tensor]):
    """Replace ``tensor`` by the one of worker ``source``."""

    source: int = 0

    @override
    def sent_bytes(self, rank: int, scale: float = 1.0) -> int:
        return super().sent_bytes(rank, scale) if rank == self.source else 0


@dataclass(frozen=True, eq=False, kw_only=True)
class Send(_OnTensor[Tensor]):
    """Send ``tensor`` to one worker."""

    collective: ClassVar[bool] = False
    destination: int
    tag: int = 0


@dataclass(frozen=True, eq=False, kw_only=True)
class Receive(_OnTensor[Tensor]):
    """Receive a message from worker ``source`` with the same ``tag`` into ``tensor``.

    Attributes:
        source: Rank of the sender.
        tag: Number that the sender gave to the message.
        patient: True for a server that waits for requests. The operation then has no time limit,
            and fails only when the connection is lost.
    """

    collective: ClassVar[bool] = False
    source: int
    tag: int = 0
    patient: bool = False

    @override
    def sent_bytes(self, rank: int, scale: float = 1.0) -> int:
        return 0


@dataclass(frozen=True, eq=False, kw_only=True)
class Await(Operation[R]):
    """Wait for a promise that another thread of this worker fulfils. Sends nothing.

    It is an operation so that its time limit, its errors and the accounting of its waiting time
    are those of all other operations.

    Attributes:
        promise: Promise to wait for.
        patient: True for background threads. The wait then has no time limit, and fails only when
            the connections of this worker are closed.
    """

    collective: ClassVar[bool] = False
    promise: Promise[R]
    patient: bool = False
