"""Operations between workers: objects that are passed to ``Communicator.start``.

Code that concerns all operations (counting bytes, recording, failing the k-th operation in a test)
needs to wrap only ``start``.
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
    """An operation between workers. Waiting for it returns a result of type ``R``.

    Attributes:
        what: Name of the operation in error messages.
    """

    what: str

    collective: ClassVar[bool] = True
    """True if all workers must start the operation; False for messages and promises."""

    def sent_bytes(self, rank: int, scale: float = 1.0) -> int:
        """Return the size in bytes of the data that worker ``rank`` contributes.

        Args:
            rank: Rank of the worker that starts the operation.
            scale: ``Host.scale``. It exceeds 1 if a simulation uses a small tensor as placeholder
                for a large one. The result is then the size of the large tensor.
        """
        return 0


@dataclass(frozen=True, eq=False, kw_only=True)
class _OnTensor(Operation[R]):
    """An operation on one tensor.

    Attributes:
        tensor: Tensor of this worker. ``Sum``, ``Maximum``, ``Broadcast`` and ``Receive`` overwrite
            it with the result. The other operations only read it.
        tail: Number of elements at the end of ``tensor`` that are not model data. Each of them
            counts as one element, whatever ``Host.scale`` is.
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
    """All-gather: the result is a list of every worker's ``tensor`` in rank order."""


class Exchange(_OnTensor[Tensor]):
    """All-to-all: divide ``tensor`` into one equal chunk per worker, and send chunk k to worker k.

    The result is a new tensor of the same shape. Its chunk k was sent by worker k.
    """


@dataclass(frozen=True, eq=False, kw_only=True)
class Broadcast(_OnTensor[Tensor]):
    """Copy the ``tensor`` of worker ``source`` to ``tensor`` on all other workers."""

    source: int = 0

    @override
    def sent_bytes(self, rank: int, scale: float = 1.0) -> int:
        return super().sent_bytes(rank, scale) if rank == self.source else 0


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
            then fails only when its connection is lost or closed.
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
    """Wait until another thread of this worker fulfils ``promise``. Sends nothing.

    It is an operation so that its time limit, errors and waiting time are handled like those of
    all other operations.

    Attributes:
        promise: Promise to wait for.
        patient: True to wait without a time limit, as background threads do. The wait then fails
            only when the connections of this worker are closed.
    """

    collective: ClassVar[bool] = False
    promise: Promise[R]
    patient: bool = False
