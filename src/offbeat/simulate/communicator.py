"""A communicator that runs its operations on the simulated cluster."""

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from typing_extensions import override

from offbeat.errors import CommunicationError, CommunicationTimeout
from offbeat.simulate.board import SimulatedBoard
from offbeat.simulate.cluster import Contribution, SimulatedCluster
from offbeat.simulate.connections import Group
from offbeat.simulate.host import SimulatedHost, SimulatedPromise
from offbeat.simulate.kernel import Signal
from offbeat.simulate.network import CollectiveKind
from offbeat.transport.board import Board, LocalBoard
from offbeat.transport.communicator import Communicator
from offbeat.transport.handle import Handle
from offbeat.transport.operation import (
    Await,
    Broadcast,
    Exchange,
    Gather,
    Maximum,
    Operation,
    Receive,
    Send,
    Sum,
)


class SimulatedHandle(Handle[Any]):
    """Handle of an operation of the simulated cluster. ``wait`` returns ``result``.

    With ``patient``, ``wait`` has no time-out. A server waits for requests in this way.
    """

    def __init__(
        self,
        communicator: "SimulatedCommunicator",
        signal: Signal,
        result: Any,
        what: str,
        *,
        patient: bool = False,
    ) -> None:
        self._communicator, self._patient = communicator, patient
        self._signal, self._result, self._what = signal, result, what

    @override
    def done(self) -> bool:
        """Return True if the operation has ended or failed. Every 100th poll takes virtual time."""
        if not self._signal.happened:
            self._communicator.host.polled(self._what)
        return self._signal.happened

    @override
    def wait(self) -> Any:
        communicator, host = self._communicator, self._communicator.host
        start = host.now()
        if not self._patient and communicator.timeout_seconds < math.inf:
            connections, limit = communicator.cluster.connections, communicator.timeout_seconds
            connections.fail_after(self._signal, limit, self._what)
        host.wait(self._signal, self._what)
        failure = self._signal.failure
        if failure is None or communicator.member in self._signal.spared:
            return self._result
        seconds = host.now() - start
        text = f"rank {communicator.rank}: {self._what} failed after {seconds:.1f} s: {failure}"
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
        boards: Boards of the training by name, shared by all workers.
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
        self.cluster, self.member, self.group, self._context = cluster, member, group, context
        self.rank, self.size = group.members.index(member), len(group.members)
        self.timeout_seconds = timeout_seconds
        self.boards: dict[str, LocalBoard] = {}
        self.host: SimulatedHost = SimulatedHost(cluster, member) if host is None else host
        self._twins = 0

    @override
    def start(self, operation: Operation[Any]) -> Handle[Any]:
        match operation:
            case Sum():
                return self.reduce(operation, Tensor.add_)
            case Maximum():
                return self.reduce(operation, _maximum_)
            case Broadcast(tensor=tensor, source=source):
                return self._join("broadcast", operation, operator.itemgetter(source), tensor.copy_)
            case Gather(tensor=tensor):
                parts = [torch.empty_like(tensor) for _ in range(self.size)]

                def store_parts(tensors: Sequence[Tensor]) -> None:
                    for part, received in zip(parts, tensors, strict=True):
                        part.copy_(received)

                return self._join("gather", operation, list, store_parts, parts)
            case Exchange(tensor=tensor):
                result = torch.empty_like(tensor)

                def store_chunks(tensors: Sequence[Tensor]) -> None:
                    torch.cat([each.chunk(self.size)[self.rank] for each in tensors], out=result)

                return self._join("exchange", operation, list, store_chunks, result)
            case Send(tensor=tensor, destination=destination, tag=tag, what=what):
                route = self.member, self.group.members[destination], tag
                signal = self.cluster.send(self.group, self._context, route, tensor, what)
                return SimulatedHandle(self, signal, tensor, what)
            case Receive(tensor=tensor, source=source, tag=tag, what=what, patient=patient):
                route = self.group.members[source], self.member, tag
                signal = self.cluster.receive(self.group, self._context, route, tensor)
                return SimulatedHandle(self, signal, tensor, what, patient=patient)
            case Await(promise=promise, what=what, patient=patient):
                assert isinstance(promise, SimulatedPromise)
                signal = promise.signal
                if self.cluster.faulty:  # a time-out of this wait must not fulfil the promise
                    promise.signal.then((signal := Signal()).fire)
                handle = SimulatedHandle(self, signal, None, what, patient=patient)
                return handle.then(lambda _: promise.result)
        raise TypeError(f"there is no simulated {type(operation).__name__}")

    def reduce(
        self, operation: Sum | Maximum, accumulate: Callable[[Tensor, Tensor], object]
    ) -> Handle[Tensor]:
        """Start an all-reduce that replaces the tensor of ``operation`` by its result.

        ``accumulate(a, b)`` reduces two tensors and stores the result in ``a``, as ``Tensor.add_``
        does.
        """

        def combine(tensors: Sequence[Tensor]) -> Tensor:
            total = tensors[0].clone()
            for tensor in tensors[1:]:
                accumulate(total, tensor)
            return total

        return self._join("reduce", operation, combine, operation.tensor.copy_)

    def _join(
        self,
        kind: CollectiveKind,
        operation: Any,
        combine: Callable[[Sequence[Tensor]], Any],
        store: Callable[[Any], object],
        result: Any = None,
    ) -> Handle[Any]:
        """Start a collective whose handle returns ``result`` (None: the operation's tensor)."""
        tensor, what = operation.tensor, operation.what
        contribution = Contribution(kind, what, tensor, combine, store)
        signal = self.cluster.join(self.group, self._context, self.member, contribution)
        return SimulatedHandle(self, signal, tensor if result is None else result, what)

    @override
    def twin(self) -> Communicator:
        self._twins += 1
        return self._derived(self.group, self._twins - 1)

    def subgroup(self, ranks: Sequence[int], *, sharing: int = 1) -> Self:
        """Return a communicator of some of these workers, including this one.

        Args:
            ranks: Ranks of the members in this communicator, in the order of their new ranks.
            sharing: Number of such subgroups that use the links of the nodes concurrently.
        """
        members = tuple(self.group.members[rank] for rank in ranks)
        group = self.cluster.connections.subgroup(self._context, members, sharing)
        return self._derived(group, members)

    def _derived(self, group: Group, key: int | tuple[int, ...]) -> Self:
        context = self.cluster.connections.derived_context(self._context, key)
        return type(self)(
            self.cluster, self.member, group, context, self.host, self.timeout_seconds
        )

    @override
    def board(self, name: str) -> Board:
        values = self.boards.setdefault(name, LocalBoard())
        return SimulatedBoard(self.cluster, self.member, values)

    @override
    def close(self, *, together: bool = False) -> None:
        """End this worker's connections in the group. With ``together``, do nothing."""
        if not together:
            self.cluster.connections.disconnect(self.group, self.member)


def _maximum_(total: Tensor, other: Tensor) -> None:
    torch.maximum(total, other, out=total)
