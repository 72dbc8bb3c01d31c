"""The seam over virtual time: what starts an operation of the simulated cluster."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from offbeat.fabric import Communicator, Handle
from offbeat.fabric.operation import (
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
from offbeat.simulate.cluster import Collective, SimulatedCluster
from offbeat.simulate.host import SimulatedHost, SimulatedPromise
from offbeat.simulate.kernel import Signal


class SimulatedCommunicator(Communicator):
    """One worker's end of the simulated cluster. Sums are taken in rank order.

    Args:
        cluster: What the workers share.
        rank: This worker.
        group: Collectives meet within a group of this number, in the order of their start.
        host: Its clock; a twin shares that of the original.
    """

    timeout_seconds = float("inf")  # who waits for ever is in a deadlock, which is found out

    def __init__(
        self,
        cluster: SimulatedCluster,
        rank: int,
        group: int = 0,
        host: SimulatedHost | None = None,
    ) -> None:
        self.cluster, self.rank, self.size, self._group = cluster, rank, cluster.size, group
        self.host: SimulatedHost = SimulatedHost(cluster, rank) if host is None else host
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
                signal = self.cluster.send(self._group, self.rank, destination, tag, tensor, what)
                return _SimulatedHandle(self.host, signal, tensor, what)
            case Receive(tensor=tensor, source=source, tag=tag, what=what):
                signal = self.cluster.receive(self._group, source, self.rank, tag, tensor)
                return _SimulatedHandle(self.host, signal, tensor, what)
            case Await(promise=promise, what=what):
                assert isinstance(promise, SimulatedPromise)
                handle = _SimulatedHandle(self.host, promise.signal, None, what)
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
        signal = self.cluster.join(self._group, self.rank, kind, tensor, what, combine, place)
        return _SimulatedHandle(self.host, signal, tensor if result is None else result, what)

    @override
    def twin(self) -> Communicator:
        twins = self.cluster.twins
        number = twins.setdefault((self._group, self._twins), -1 - len(twins))
        self._twins += 1
        return SimulatedCommunicator(self.cluster, self.rank, number, self.host)

    @override
    def close(self, *, together: bool = False) -> None:
        """Nothing is held; activities end with the run."""


class _SimulatedHandle(Handle[Any]):
    def __init__(self, host: SimulatedHost, signal: Signal, result: Any, what: str) -> None:
        self._host, self._signal, self._result, self._what = host, signal, result, what

    @override
    def done(self) -> bool:
        if not self._signal.happened:
            self._host.polled(self._what)
        return self._signal.happened

    @override
    def wait(self) -> Any:
        self._host.wait(self._signal, self._what)
        return self._result


def _larger(total: Tensor, one: Tensor) -> None:
    torch.maximum(total, one, out=total)
