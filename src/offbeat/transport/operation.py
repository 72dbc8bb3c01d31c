"""What a worker may ask of the others, as values that a communicator starts.

Because an operation is a value, whatever concerns all of them (counting, recording, a fault at the
k-th of them) is a wrapper around one method, ``Communicator.start``.
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
    """Something between workers that gives an ``R``.

    Attributes:
        what: Names it in errors.
    """

    what: str

    collective: ClassVar[bool] = True
    """Whether all workers start it, in the same order; else two of them, or one."""

    def sent_bytes(self, rank: int, scale: float = 1.0) -> int:
        """Bytes of the tensors that worker ``rank`` hands over, at ``Host.scale``."""
        return 0


@dataclass(frozen=True, eq=False, kw_only=True)
class _OnTensor(Operation[R]):
    """An operation on one tensor.

    Attributes:
        tensor: The tensor that the worker hands over.
        tail: Numbers at its end that stand for themselves, whatever ``Host.scale``.
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
    """Collect every worker's ``tensor``, in rank order, on all workers."""


class Exchange(_OnTensor[Tensor]):
    """All-to-all: of ``size`` equal chunks of ``tensor``, the k-th goes to worker k.

    The result is a new tensor of the same size, whose k-th chunk comes from worker k.
    """


@dataclass(frozen=True, eq=False, kw_only=True)
class Broadcast(_OnTensor[Tensor]):
    """Replace ``tensor`` by that of worker ``source``."""

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
    """Fill ``tensor`` with what worker ``source`` sends under the same ``tag``.

    ``patient`` is for servers, which wait for requests: no time-out, but an error as soon as the
    connection is lost.
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
    """Wait for a promise, which another activity of this worker fulfils. Nothing is sent.

    It is an operation because its time-out, its error and its waiting are those of the others.
    ``patient`` is for activities beside the worker: no time-out, but an error once it has left.
    """

    collective: ClassVar[bool] = False
    promise: Promise[R]
    patient: bool = False
