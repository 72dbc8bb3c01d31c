"""A communicator that passes all operations on to another one."""

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from offbeat.transport.board import Board
from offbeat.transport.communicator import Communicator, Kind
from offbeat.transport.handle import Operation
from offbeat.transport.host import Promise


class Wrapper(Communicator):
    """Base class of communicators that change or record the operations of ``inner``."""

    def __init__(self, inner: Communicator) -> None:
        super().__init__(inner.rank, inner.size, inner.timeout_seconds, inner.host)
        self.inner = inner

    @property
    @override
    def control_device(self) -> torch.device:
        return self.inner.control_device

    @override
    def start(
        self, kind: Kind, tensor: Tensor, what: str, peer: int, tag: int, patient: bool
    ) -> Operation[Any]:
        return self.inner.start(kind, tensor, what, peer, tag, patient)

    @override
    def start_wait(self, promise: Promise[Any], what: str, patient: bool) -> Operation[Any]:
        return self.inner.start_wait(promise, what, patient)

    @override
    def separate(self) -> None:
        self.inner = self.inner.twin()

    @override
    def board(self, name: str) -> Board:
        return self.inner.board(name)

    @override
    def close(self, *, together: bool = False) -> None:
        self.inner.close(together=together)
