"""A communicator whose operations fail, for tests of failure handling.

A transport puts it between the workers:

    class Faulty:
        def make_communicator(self, timeout_seconds):
            inner = open_communicator(None, timeout_seconds, what="a test")
            return Faults(inner, [Fault("fail", rank=1, operation=7)])

    offbeat.attach(model, optimizer, strategy, group=Faulty())
"""

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor
from typing_extensions import override

from offbeat.errors import CommunicationError
from offbeat.transport.communicator import Communicator, Kind
from offbeat.transport.handle import Operation
from wrapper import Wrapper


@dataclass(frozen=True)
class Fault:
    """A fault at one operation of one worker.

    Attributes:
        kind: "fail": the operation takes place, but ``wait`` raises CommunicationError on this
            worker.
        rank: Rank of the worker.
        operation: Number of the operation, from 0. Operations of twins and of set-up count, those
            that only wait for another thread do not.
        background: True for an operation that a background thread starts. These are numbered
            separately, so that the numbers are equal on all workers.
    """

    kind: Literal["fail"]
    rank: int
    operation: int
    background: bool = False


class Faults(Wrapper):
    """A communicator with the given faults."""

    def __init__(self, inner: Communicator, faults: Iterable[Fault]) -> None:
        super().__init__(inner)
        self._faults = {(f.background, f.operation): f for f in faults if f.rank == inner.rank}
        self._counter = [0, 0]
        self._thread = threading.current_thread()

    @property
    def counts(self) -> tuple[int, int]:
        """Numbers of operations of the training thread and of others, including those of twins."""
        main, background = self._counter
        return main, background

    @override
    def start(
        self, kind: Kind, tensor: Tensor, what: str, peer: int, tag: int, patient: bool
    ) -> Operation[Any]:
        background = threading.current_thread() is not self._thread
        fault = self._faults.get((background, self._counter[background]))
        self._counter[background] += 1
        operation = super().start(kind, tensor, what, peer, tag, patient)
        if fault is not None:
            return _Failing(operation, f"rank {self.rank}: {what} failed on purpose")
        return operation


class _Failing(Operation[Any]):
    def __init__(self, operation: Operation[Any], text: str) -> None:
        self._operation, self._text = operation, text

    @override
    def done(self) -> bool:
        return self._operation.done()

    @override
    def block(self) -> Any:
        self._operation.wait()
        raise CommunicationError(self._text)
