"""A communicator that records its operations and lets some fail, for tests of failure handling.

A transport puts it between the workers:

    class Faulty:
        def make_communicator(self, timeout_seconds):
            inner = open_communicator(None, timeout_seconds, what="a test")
            return Watched(inner, [Fault("fail", rank=1, operation=7)])

    offbeat.attach(model, optimizer, strategy, group=Faulty())
"""

import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor
from typing_extensions import override

from offbeat.errors import CommunicationError
from offbeat.transport.communicator import Communicator, Kind
from offbeat.transport.future import Operation
from offbeat.transport.host import Promise
from offbeat.transport.key_value_store import KeyValueStore


@dataclass(frozen=True)
class Fault:
    """A fault at one operation of one worker.

    Attributes:
        kind: "fail": the operation takes place, but ``wait`` raises CommunicationError on this
            worker.
        rank: Rank of the worker.
        operation: Number of the operation, from 0. Operations of duplicates and of set-up count,
            those that only wait for another thread do not.
        background: True for an operation that a background thread starts. These are numbered
            separately, so that the numbers are equal on all workers.
    """

    kind: Literal["fail"]
    rank: int
    operation: int
    background: bool = False


class Watched(Communicator):
    """Passes all operations on to ``inner``, and records them and those of its duplicates.

    Attributes:
        operations: Kind, name and payload bytes of each operation, in order.
        tensors: Weak references to the tensors sent.
    """

    def __init__(self, inner: Communicator, faults: Iterable[Fault] = ()) -> None:
        super().__init__(inner.rank, inner.size, inner.timeout_seconds, inner.host)
        self.inner = inner
        self.operations: list[tuple[str, str, int]] = []
        self.tensors: list[weakref.ref[Tensor]] = []
        self._faults = {(f.background, f.operation): f for f in faults if f.rank == inner.rank}
        self._counter = [0, 0]
        self._thread = threading.current_thread()

    @property
    def counts(self) -> tuple[int, int]:
        """Numbers of operations of the training thread and of others, with those of duplicates."""
        main, background = self._counter
        return main, background

    @override
    def start(
        self, kind: Kind, tensor: Tensor, what: str, peer: int, tag: int, patient: bool
    ) -> Operation[Any]:
        sends = kind != "receive" and (kind != "broadcast" or peer == self.rank)
        self.operations.append((kind, what, tensor.nbytes if sends else 0))
        self.tensors.append(weakref.ref(tensor))
        background = threading.current_thread() is not self._thread
        fault = self._faults.get((background, self._counter[background]))
        self._counter[background] += 1
        operation = self.inner.start(kind, tensor, what, peer, tag, patient)
        if fault is not None:
            return _Failing(operation, f"rank {self.rank}: {what} failed on purpose")
        return operation

    @override
    def start_wait(self, promise: Promise[Any], what: str, patient: bool) -> Operation[Any]:
        return self.inner.start_wait(promise, what, patient)

    @override
    def separate(self) -> None:
        self.inner = self.inner.duplicate()

    @override
    def store(self, name: str) -> KeyValueStore:
        return self.inner.store(name)

    @override
    def close(self, *, together: bool = False) -> None:
        self.inner.close(together=together)


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
