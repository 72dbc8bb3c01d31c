"""A communicator that runs its operations on the simulated cluster."""

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from offbeat.errors import CommunicationError, CommunicationTimeout
from offbeat.simulate.cluster import Contribution, SimulatedCluster
from offbeat.simulate.connections import Group
from offbeat.simulate.host import SimulatedHost, SimulatedPromise
from offbeat.simulate.kernel import Signal
from offbeat.simulate.key_value_store import SimulatedStore
from offbeat.simulate.network import CollectiveKind
from offbeat.transport.communicator import Communicator, Kind
from offbeat.transport.future import Operation
from offbeat.transport.host import Promise
from offbeat.transport.key_value_store import KeyValueStore
from offbeat.transport.torch_backend.torch_store import TorchStore

T = TypeVar("T")


class SimulatedOperation(Operation[Any]):
    """An operation of the simulated cluster.

    Args:
        worker: Communicator that starts the operation.
        signal: Fires when the operation ends or fails.
        result: Function that returns the result.
        what: Name of the operation.
        patient: True if a wait has no time-out.
    """

    def __init__(
        self,
        worker: "SimulatedCommunicator",
        signal: Signal,
        result: Callable[[], Any],
        what: str,
        *,
        patient: bool = False,
    ) -> None:
        self._worker, self._patient = worker, patient
        self._signal, self._result, self._what = signal, result, what

    @override
    def done(self) -> bool:
        """Return True if the operation has ended or failed. Every 100th poll takes virtual time."""
        if not self._signal.happened:
            self._worker.host.polled(self._what)
        return self._signal.happened

    @override
    def block(self) -> Any:
        worker, host = self._worker, self._worker.host
        start = host.now()
        if not self._patient and worker.timeout_seconds < math.inf:
            connections, limit = worker.cluster.connections, worker.timeout_seconds
            connections.fail_after(self._signal, limit, self._what)
        host.wait(self._signal, self._what)
        failure = self._signal.failure
        if failure is None or worker.member in self._signal.spared:
            return self._result()
        seconds = host.now() - start
        text = f"rank {worker.rank}: {self._what} failed after {seconds:.1f} s: {failure}"
        timed_out = isinstance(failure, CommunicationTimeout)
        raise (CommunicationTimeout if timed_out else CommunicationError)(text)


class SimulatedCommunicator(Communicator):
    """Communicator of one worker of the simulated cluster. Sums are taken in rank order.

    Args:
        cluster: The simulated cluster.
        member: Global rank of this worker.
        group: The connected workers.
        context: Number that separates the operations of this communicator from those of other
            communicators of the same group.
        host: Clock and background threads of this worker; None creates a host.
        timeout_seconds: Time-out of an operation, virtual seconds. If it is infinite, an operation
            that never ends leads to a ``DeadlockError``.

    Attributes:
        stores: Stores of the training by name, shared by all workers.
    """

    def __init__(
        self,
        cluster: SimulatedCluster,
        member: int,
        group: Group,
        context: int = 0,
        host: SimulatedHost | None = None,
        timeout_seconds: float = math.inf,
    ) -> None:
        host = SimulatedHost(cluster, member) if host is None else host
        super().__init__(group.members.index(member), len(group.members), timeout_seconds, host)
        self.host: SimulatedHost = host
        self.cluster, self.member, self.group, self._context = cluster, member, group, context
        self.stores: dict[str, KeyValueStore] = {}
        self._duplicates = itertools.count()

    @override
    def start(
        self, kind: Kind, tensor: Tensor, what: str, peer: int, tag: int, patient: bool
    ) -> Operation[Any]:
        match kind:
            case "sum":
                return self.reduce(tensor, what, Tensor.add_)
            case "maximum":
                return self.reduce(tensor, what, _maximum_)
            case "broadcast":
                choose = operator.itemgetter(peer)
                return self._join("broadcast", tensor, what, choose, tensor.copy_, tensor)
            case "gather":
                parts = [torch.empty_like(tensor) for _ in range(self.size)]

                def store_parts(tensors: Sequence[Tensor]) -> None:
                    for part, received in zip(parts, tensors, strict=True):
                        part.copy_(received)

                return self._join("gather", tensor, what, list, store_parts, parts)
            case "exchange":
                result = torch.empty_like(tensor)

                def store_chunks(tensors: Sequence[Tensor]) -> None:
                    torch.cat([each.chunk(self.size)[self.rank] for each in tensors], out=result)

                return self._join("exchange", tensor, what, list, store_chunks, result)
            case "send":
                route = self.member, self.group.members[peer], tag
                signal = self.cluster.send(self.group, self._context, route, tensor, what)
            case "receive":
                route = self.group.members[peer], self.member, tag
                signal = self.cluster.receive(self.group, self._context, route, tensor)
        return SimulatedOperation(self, signal, lambda: tensor, what, patient=patient)

    @override
    def start_wait(self, promise: Promise[T], what: str, patient: bool) -> Operation[T]:
        assert isinstance(promise, SimulatedPromise)
        signal = promise.signal
        if self.cluster.faulty:  # a time-out of this wait must not fulfil the promise
            promise.signal.then((signal := Signal()).fire)
        return SimulatedOperation(self, signal, lambda: promise.result, what, patient=patient)

    def reduce(
        self, tensor: Tensor, what: str, accumulate: Callable[[Tensor, Tensor], object]
    ) -> Operation[Tensor]:
        """Start an all-reduce that replaces ``tensor`` by its result.

        ``accumulate(a, b)`` reduces two tensors and stores the result in ``a``, as ``Tensor.add_``
        does.
        """

        def combine(tensors: Sequence[Tensor]) -> Tensor:
            total = tensors[0].clone()
            for tensor in tensors[1:]:
                accumulate(total, tensor)
            return total

        return self._join("reduce", tensor, what, combine, tensor.copy_, tensor)

    def _join(
        self,
        kind: CollectiveKind,
        tensor: Tensor,
        what: str,
        combine: Callable[[Sequence[Tensor]], Any],
        store: Callable[[Any], object],
        result: Any,
    ) -> Operation[Any]:
        contribution = Contribution(kind, what, tensor, combine, store)
        signal = self.cluster.join(self.group, self._context, self.member, contribution)
        return SimulatedOperation(self, signal, lambda: result, what)

    @override
    def separate(self) -> None:
        """Give this copy a context of its own."""
        key = next(self._duplicates)
        self._context = self.cluster.connections.derived_context(self._context, key)
        self._duplicates = itertools.count()

    def subgroup(self, ranks: Sequence[int], *, sharing: int = 1) -> Self:
        """Return a communicator of some of these workers, including this one.

        Args:
            ranks: Ranks of the members in this communicator, in the order of their new ranks.
            sharing: Number of such subgroups that use the links of the nodes concurrently.
        """
        members = tuple(self.group.members[rank] for rank in ranks)
        group = self.cluster.connections.subgroup(self._context, members, sharing)
        context = self.cluster.connections.derived_context(self._context, members)
        return type(self)(
            self.cluster, self.member, group, context, self.host, self.timeout_seconds
        )

    @override
    def store(self, name: str) -> KeyValueStore:
        values = self.stores.setdefault(name, TorchStore())
        return SimulatedStore(self.cluster, self.member, values)

    @override
    def close(self, *, together: bool = False) -> None:
        """End this worker's connections in the group. With ``together``, do nothing."""
        if not together:
            self.cluster.connections.disconnect(self.group, self.member)


def _maximum_(total: Tensor, other: Tensor) -> None:
    torch.maximum(total, other, out=total)
