"""A communicator that records the operations it starts."""

import weakref
from typing import TypeVar

from torch import Tensor
from typing_extensions import override

from offbeat.transport.communicator import Communicator, Wrapper
from offbeat.transport.handle import Handle
from offbeat.transport.operation import Operation

T = TypeVar("T")


class Recording(Wrapper):
    """Records every operation, including those of its twins.

    Attributes:
        operations: Kind, name and payload bytes of each operation, in order.
        tensors: Weak references to the tensors sent.
    """

    def __init__(
        self,
        inner: Communicator,
        operations: list[tuple[str, str, int]] | None = None,
        tensors: list[weakref.ref[Tensor]] | None = None,
    ) -> None:
        super().__init__(inner)
        self.operations = [] if operations is None else operations
        self.tensors = [] if tensors is None else tensors

    @override
    def start(self, operation: Operation[T]) -> Handle[T]:
        size = operation.sent_bytes(self.rank)
        self.operations.append((type(operation).__name__, operation.what, size))
        tensor = getattr(operation, "tensor", None)
        if tensor is not None:
            self.tensors.append(weakref.ref(tensor))
        return self.inner.start(operation)

    @override
    def twin(self) -> Communicator:
        return Recording(self.inner.twin(), self.operations, self.tensors)
