"""Operations between workers, as values that ``Communicator.start`` starts.

Because an operation is a value, code that concerns all operations (counting bytes, recording,
failing the k-th operation in a test) wraps only this method.
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
        """Return the payload of worker ``rank``: the bytes that it passes to the operation.

        Args:
            rank: Rank of the worker.
            scale: ``Host.scale``: 1, or larger if the tensor is a placeholder for a larger one.
        """
        return 0


@dataclass(frozen=True, eq=False, kw_only=True)
class _OnTensor(Operation[R]):
    """An operation on one tensor.

    Attributes:
        tensor: Tensor of this worker. Sums and maxima replace their input by the result. A
            broadcast reads the tensor on the source and writes it on the other workers. A receive
            only writes it, and all other operations only read it.
        tail: Number of elements at the end of ``tensor`` that are not model data; see
            ``Host.scale``.
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
    """All-gather: the result lists every worker's ``tensor`` in rank order, on all workers."""


class Exchange(_OnTensor[Tensor]):
    """All-to-all: divide ``tensor`` into one equal chunk per worker, and send chunk k to worker k.

    The result is a new tensor of the same size. Its chunk k comes from worker k.
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
    """Receive the message that worker ``source`` sends with this ``tag``, into ``tensor``.

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
    are the same as for all other operations.

    Attributes:
        promise: Promise to wait for.
        patient: True for background threads. The wait then has no time limit, and fails only when
            the connections of this worker are closed.
    """

    collective: ClassVar[bool] = False
    promise: Promise[R]
    patient: bool = False
