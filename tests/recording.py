"""A communicator that records the operations it starts."""

import weakref
from typing import Any

from torch import Tensor
from typing_extensions import override

from offbeat.transport.communicator import Communicator, Kind
from offbeat.transport.handle import Operation
from wrapper import Wrapper


class Recording(Wrapper):
    """Records every operation, including those of its twins.

    Attributes:
        operations: Kind, name and payload bytes of each operation, in order.
        tensors: Weak references to the tensors sent.
    """

    def __init__(
        self,
        inner: Communicator,
        operations: list[tuple[str, str, int]],
        tensors: list[weakref.ref[Tensor]],
    ) -> None:
        super().__init__(inner)
        self.operations, self.tensors = operations, tensors

    @override
    def start(
        self, kind: Kind, tensor: Tensor, what: str, peer: int, tag: int, patient: bool
    ) -> Operation[Any]:
        sends = kind != "receive" and (kind != "broadcast" or peer == self.rank)
        self.operations.append((kind, what, tensor.nbytes if sends else 0))
        self.tensors.append(weakref.ref(tensor))
        return super().start(kind, tensor, what, peer, tag, patient)
