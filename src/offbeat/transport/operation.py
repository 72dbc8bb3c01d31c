"""Operations between workers: objects that are passed to ``Communicator.start``.

All operations pass through this one method. A wrapper of ``start`` can thus count, record or delay
every operation; see ``transport/accounting.py``.
"""

from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

from torch import Tensor
from typing_extensions import override

from offbeat.transport.host import Promise

R = TypeVar("R")


@dataclass(frozen=True, eq=False, kw_only=True)
class Operation(Generic[R]):
    """An operation between workers. Waiting for it returns a result of type ``R``.

    Attributes:
        what: Name of the operation in error messages.
    """

    what: str

    collective: ClassVar[bool] = True
    """True if all workers must start the operation; False for messages and promises."""

    def sent_bytes(self, rank: int) -> int:
        """Return the size in bytes of the tensor that worker ``rank`` sends; 0 if it sends none."""
        return 0


@dataclass(frozen=True, eq=False, kw_only=True)
class _OnTensor(Operation[R]):
    """An operation on one tensor.

    Attributes:
        tensor: Tensor of this worker. ``Sum``, ``Maximum``, ``Broadcast`` and ``Receive`` overwrite
            it with the result. The other operations only read it.
    """

    tensor: Tensor

    @override
    def sent_bytes(self, rank: int) -> int:
        size: int = self.tensor.nbytes
        return size


class Sum(_OnTensor[Tensor]):
    """Replace ``tensor`` by its sum over the workers."""


class Maximum(_OnTensor[Tensor]):
    """Replace ``tensor`` by its elementwise maximum over the workers."""


class Gather(_OnTensor[list[Tensor]]):
    """All-gather: the result is a list of every worker's ``tensor`` in rank order."""


class Exchange(_OnTensor[Tensor]):
    """All-to-all: divide ``tensor`` into one equal chunk per worker, and send chunk k to worker k.

    The result is a new tensor of the chunks received, in rank order. With two workers that hold
    ``[a0, a1]`` and ``[b0, b1]``, worker 0 receives ``[a0, b0]`` and worker 1 ``[a1, b1]``.
    """


@dataclass(frozen=True, eq=False, kw_only=True)
class Broadcast(_OnTensor[Tensor]):
    """Copy the ``tensor`` of worker ``source`` to ``tensor`` on all other workers."""

    source: int = 0

    @override
    def sent_bytes(self, rank: int) -> int:
        return super().sent_bytes(rank) if rank == self.source else 0


@dataclass(frozen=True, eq=False, kw_only=True)
class Send(_OnTensor[Tensor]):
    """Send ``tensor`` to worker ``destination``, which must start a ``Receive`` with this tag."""

    collective: ClassVar[bool] = False
    destination: int
    tag: int = 0


@dataclass(frozen=True, eq=False, kw_only=True)
class Receive(_OnTensor[Tensor]):
    """Overwrite ``tensor`` with a message that worker ``source`` sends with this tag.

    Attributes:
        source: Rank of the sender.
        tag: The ``tag`` of the sender's ``Send``.
        patient: True to wait without a time limit, as a server does for requests. The operation
            then fails only if its connection is lost or closed.
    """

    collective: ClassVar[bool] = False
    source: int
    tag: int = 0
    patient: bool = False

    @override
    def sent_bytes(self, rank: int) -> int:
        return 0


@dataclass(frozen=True, eq=False, kw_only=True)
class Await(Operation[R]):
    """Wait until another thread of this worker fulfils ``promise``. Sends nothing.

    This is an operation because it needs the same time limit, errors and accounting of waiting
    time as the others.

    Attributes:
        patient: True to wait without a time limit, as background threads do. The wait then fails
            only if the connections of this worker are closed.
    """

    collective: ClassVar[bool] = False
    promise: Promise[R]
    patient: bool = False
