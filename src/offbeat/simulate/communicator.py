"""The seam over virtual time: what starts an operation of the simulated cluster."""

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from typing_extensions import override

from offbeat.errors import CommunicationError, CommunicationTimeout
from offbeat.simulate.cluster import Collective, Line, SimulatedCluster
from offbeat.simulate.host import SimulatedHost, SimulatedPromise
from offbeat.simulate.kernel import Signal
from offbeat.transport.communicator import Communicator
from offbeat.transport.handle import Handle
from offbeat.transport.membership import Membership
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


class SimulatedCommunicator(Communicator):
    """One worker's end of the simulated cluster. Sums are taken in rank order.

    Args:
        cluster: What the workers share.
        member: This worker.
        line: Connects it with the others, in the order of their ranks.
        group: Collectives meet within a group of this number, in the order of their start.
        host: Its clock; a twin shares that of the original.
        timeout_seconds: How long an operation may take. Infinite where no worker can be lost: who
            waits for ever is in a deadlock, which is found out.

    Attributes:
        membership: Agrees on who goes on, where workers can be lost.
    """

    def __init__(
        self,
        cluster: SimulatedCluster,
        member: int,
        line: Line,
        group: int = 0,
        host: SimulatedHost | None = None,
        timeout_seconds: float = math.inf,
    ) -> None:
        self.cluster, self.member, self.line, self._group = cluster, member, line, group
        self.rank, self.size = line.members.index(member), len(line.members)
        self.timeout_seconds = timeout_seconds
        self.membership: Membership | None = None
        self.host: SimulatedHost = SimulatedHost(cluster, member) if host is None else host
        self._twins = 0

    @override
    def start(self, operation: Operation[Any]) -> Handle[Any]:
        match operation:
            case Sum(tensor=tensor, what=what):
                return self.reduce(tensor, Tensor.add_, what)
            case Maximum(tensor=tensor, what=what):
                return self.reduce(tensor, _larger, what)
            case Broadcast(tensor=tensor, source=source, what=what):
                pick = operator.itemgetter(source)
                return self._join("broadcast", tensor, what, pick, tensor.copy_)
            case Gather(tensor=tensor, what=what):
                parts = [torch.empty_like(tensor) for _ in range(self.size)]

                def place(tensors: Sequence[Tensor]) -> None:
                    for part, one in zip(parts, tensors, strict=True):
                        part.copy_(one)

                return self._join("gather", tensor, what, list, place, parts)
            case Exchange(tensor=tensor, what=what):
                result = torch.empty_like(tensor)

                def take(tensors: Sequence[Tensor]) -> None:
                    chunks = [one.chunk(self.size)[self.rank] for one in tensors]
                    torch.cat(chunks, out=result)

                return self._join("exchange", tensor, what, list, take, result)
            case Send(tensor=tensor, destination=destination, tag=tag, what=what):
                there = self.line.members[destination]
                signal = self.cluster.send(
                    self.line, self._group, self.member, there, tag, tensor, what
                )
                return SimulatedHandle(self, signal, tensor, what)
            case Receive(tensor=tensor, source=source, tag=tag, what=what, patient=patient):
                there = self.line.members[source]
                signal = self.cluster.receive(
                    self.line, self._group, there, self.member, tag, tensor
                )
                return SimulatedHandle(self, signal, tensor, what, patient=patient)
            case Await(promise=promise, what=what, patient=patient):
                assert isinstance(promise, SimulatedPromise)
                signal = promise.signal
                if self.cluster.faulty:  # a time-out is no fulfilment
                    promise.signal.then((signal := Signal()).fire)
                handle = SimulatedHandle(self, signal, None, what, patient=patient)
                return handle.then(lambda _: promise.result)
        raise TypeError(f"there is no simulated {type(operation).__name__}")

    def reduce(
        self, tensor: Tensor, add: Callable[[Tensor, Tensor], object], what: str
    ) -> Handle[Tensor]:
        """Start replacing ``tensor`` by the total; ``add`` puts one more worker's into it."""

        def combine(tensors: Sequence[Tensor]) -> Tensor:
            total = tensors[0].clone()
            for one in tensors[1:]:
                add(total, one)
            return total

        return self._join("reduce", tensor, what, combine, tensor.copy_)

    def _join(
        self,
        kind: Collective,
        tensor: Tensor,
        what: str,
        combine: Callable[[Sequence[Tensor]], Any],
        place: Callable[[Any], object],
        result: Any = None,
    ) -> Handle[Any]:
        """Start a collective of any kind; see ``SimulatedCluster.join``."""
        signal = self.cluster.join(
            self.line, self._group, self.member, kind, tensor, what, combine, place
        )
        return SimulatedHandle(self, signal, tensor if result is None else result, what)

    @override
    def twin(self) -> Communicator:
        number = self.cluster.number(self._group, self._twins)
        self._twins += 1
        return type(self)(
            self.cluster, self.member, self.line, number, self.host, self.timeout_seconds
        )

    def part(self, ranks: Sequence[int], *, sharing: int = 1) -> Self:
        """A communicator of some of these workers, of whom this is one.

        Args:
            ranks: They, in the order of their ranks there.
            sharing: See ``Line``.
        """
        members = tuple(self.line.members[rank] for rank in ranks)
        line = self.cluster.part(self._group, members, sharing)
        number = self.cluster.number(self._group, members)
        return type(self)(self.cluster, self.member, line, number, self.host, self.timeout_seconds)

    @override
    def close(self, *, together: bool = False) -> None:
        """Nothing is held; activities end with the run, or when what they wait for has failed."""
        if not together:
            self.cluster.leave(self.line, self.member)


class SimulatedHandle(Handle[Any]):
    """An operation of the simulated cluster."""

    def __init__(
        self,
        communicator: SimulatedCommunicator,
        signal: Signal,
        result: Any,
        what: str,
        *,
        patient: bool = False,
    ) -> None:
        self._fabric, self._host, self._patient = communicator, communicator.host, patient
        self._signal, self._result, self._what = signal, result, what

    @override
    def done(self) -> bool:
        if not self._signal.happened:
            self._host.polled(self._what)
        return self._signal.happened

    @override
    def wait(self) -> Any:
        communicator, began = self._fabric, self._host.now()
        if not self._patient and communicator.timeout_seconds < math.inf:
            communicator.cluster.limit(self._signal, communicator.timeout_seconds, self._what)
        self._host.wait(self._signal, self._what)
        failure = self._signal.failure
        if failure is None or communicator.member in self._signal.spared:
            return self._result
        seconds = self._host.now() - began
        text = f"rank {communicator.rank}: {self._what} failed after {seconds:.1f} s: {failure}"
        timed_out = isinstance(failure, CommunicationTimeout)
        raise (CommunicationTimeout if timed_out else CommunicationError)(text)


def _larger(total: Tensor, one: Tensor) -> None:
    torch.maximum(total, one, out=total)
