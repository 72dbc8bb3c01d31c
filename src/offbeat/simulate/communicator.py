"""The seam over virtual time: what an operation costs, and what it gives."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from offbeat.errors import OffbeatError
from offbeat.fabric import Communicator, Handle, Promise
from offbeat.simulate.compute import Compute
from offbeat.simulate.kernel import Signal
from offbeat.simulate.network import (
    Network,
    all_gather_bytes,
    all_reduce_bytes,
    all_to_all_bytes,
    broadcast_bytes,
)
from offbeat.simulate.workers import Workers

Kind = Literal["reduce", "broadcast", "gather", "exchange"]
Key = tuple[int, int, int, int]  # of messages: group, source, destination, tag
_POLLS = 100  # in a row, without virtual time passing: a loop that waits for done()
_SHORTEST_NAP_SECONDS = 1e-6
_LONGEST_NAP_SECONDS = 1e-3


@dataclass(frozen=True)
class Span:
    """What one worker did from ``start`` to ``end`` (virtual seconds).

    ``kind`` is ``compute``, ``wait`` (blocked, outside of which it computes), or ``transfer`` (its
    network card was busy; overlaps the others). ``sent`` and ``received`` are bytes.
    """

    rank: int
    kind: Literal["compute", "wait", "transfer"]
    start: float
    end: float
    what: str
    sent: float = 0.0
    received: float = 0.0


class _Collective:
    """One operation of all workers, from the first that joins to the last that has its result."""

    def __init__(self, kind: Kind, what: str) -> None:
        self.kind, self.what = kind, what
        self.signal = Signal()
        self.tensors: dict[int, Tensor] = {}
        self.places: dict[int, Callable[[Any], object]] = {}


@dataclass
class _Nic:
    """When each direction of a full-duplex network card is free again, virtual seconds."""

    up: float = 0.0
    down: float = 0.0


@dataclass
class SimulatedCluster:
    """Everything the communicators of one simulation share."""

    workers: Workers
    network: Network
    compute: Compute
    seed: int
    spans: list[Span] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.size = len(self.workers.all)
        self._nics = [_Nic() for _ in range(self.size)]
        self._joined: dict[tuple[int, int], int] = {}  # collectives so far, by group and rank
        self._collectives: dict[tuple[int, int], _Collective] = {}
        self._mail: dict[Key, deque[Tensor]] = {}
        self._wanted: dict[Key, deque[tuple[Tensor, Signal]]] = {}
        self._steps = [0] * self.size
        self.twins: dict[tuple[int, int], int] = {}  # numbers of groups made by twin()

    def compute_step(self, rank: int) -> None:
        """Charge the compute time of the worker's next step."""
        seconds = self.compute.seconds(rank, self._steps[rank], self.seed)
        self._steps[rank] += 1
        start = self.workers.kernel.now
        self.workers.sleep(seconds, f"computing step {self._steps[rank]}")
        self.spans.append(Span(rank, "compute", start, self.workers.kernel.now, "step"))

    def wait(self, rank: int, signal: Signal, what: str) -> None:
        """Block the worker, and remember that it waited."""
        start = self.workers.kernel.now
        self.workers.wait(signal, what)
        if self.workers.kernel.now > start and not self.workers.current.background:
            self.spans.append(Span(rank, "wait", start, self.workers.kernel.now, what))

    def nap(self, rank: int, seconds: float, what: str) -> None:
        """Let ``seconds`` pass for a worker that polls in a loop; it counts as waiting."""
        start = self.workers.kernel.now
        self.workers.sleep(seconds, f"polling {what}")
        self.spans.append(Span(rank, "wait", start, self.workers.kernel.now, what))

    def join(
        self,
        group: int,
        rank: int,
        kind: Kind,
        tensor: Tensor,
        what: str,
        combine: Callable[[Sequence[Tensor]], Any],
        place: Callable[[Any], object],
    ) -> Signal:
        """Take part in the group's next collective.

        At its end ``combine`` makes the result, once, from all tensors in rank order, which it must
        not change, and every worker's ``place`` takes it over.
        """
        number = self._joined.get((group, rank), 0)
        self._joined[group, rank] = number + 1
        operation = self._collectives.setdefault((group, number), _Collective(kind, what))
        first = next(iter(operation.tensors.items()), (rank, tensor))
        if (operation.kind, first[1].shape, first[1].dtype) != (kind, tensor.shape, tensor.dtype):
            raise OffbeatError(
                f"collective {number}: rank {rank} starts {what} ({kind}, {_show(tensor)}), but "
                f"rank {first[0]} started {operation.what} ({operation.kind}, {_show(first[1])})"
            )
        operation.tensors[rank] = tensor
        operation.places[rank] = place
        if len(operation.tensors) == self.size:
            del self._collectives[group, number]
            self._transfer(operation, tensor.nbytes, combine)
        return operation.signal

    def _transfer(
        self, operation: _Collective, size_bytes: int, combine: Callable[[Sequence[Tensor]], Any]
    ) -> None:
        """All are there: occupy every network card, and deliver at the end."""
        kernel, network, n = self.workers.kernel, self.network, self.size
        ranks = range(n)
        seconds, sent = {
            "reduce": (network.all_reduce_seconds, all_reduce_bytes),
            "broadcast": (network.broadcast_seconds, broadcast_bytes),
            "gather": (network.all_gather_seconds, all_gather_bytes),
            "exchange": (network.all_to_all_seconds, all_to_all_bytes),
        }[operation.kind]
        duration, each = seconds(size_bytes, ranks), sent(size_bytes, n)
        start = max(kernel.now, *(max(nic.up, nic.down) for nic in self._nics))
        for rank, nic in enumerate(self._nics):
            nic.up = nic.down = start + duration
            span = Span(rank, "transfer", start, start + duration, operation.what, each, each)
            self.spans.append(span)

        def deliver() -> None:
            result = combine([operation.tensors[rank] for rank in ranks])
            for rank in ranks:
                operation.places[rank](result)
            operation.signal.fire()

        kernel.at(start + duration, deliver, f"{operation.what} ends")

    def send(
        self, group: int, source: int, destination: int, tag: int, tensor: Tensor, what: str
    ) -> Signal:
        """Start a message; it needs no receiver yet. Ends when the last byte is there.

        It leaves when what was sent before has left, whether or not the receiver's link is busy:
        the switch keeps it until it is its turn there.
        """
        kernel, size = self.workers.kernel, float(tensor.nbytes)
        up, down = self._nics[source], self._nics[destination]
        leaving, coming = self.network.link_seconds(tensor.nbytes, source, destination)
        latency = 0.0 if source == destination else self.network.latency
        start = max(kernel.now, up.up)
        up.up = start + leaving
        self.spans.append(Span(source, "transfer", start, up.up, what, sent=size))
        key, arrived = (group, source, destination, tag), Signal()
        message = tensor.detach().clone()

        def arrive() -> None:
            self._mail.setdefault(key, deque()).append(message)
            arrived.fire()
            self._deliver(key)

        def come_in() -> None:  # when it leaves, so that links are taken in the order of time
            begin = max(kernel.now, down.down)
            down.down = max(begin + coming, start + leaving)
            end = down.down + latency
            span = Span(destination, "transfer", begin, end, what, received=size)
            self.spans.append(span)
            kernel.at(end, arrive, f"{what} arrives at rank {destination}")

        kernel.at(start, come_in, f"{what} leaves rank {source}")
        return arrived

    def receive(
        self, group: int, source: int, destination: int, tag: int, tensor: Tensor
    ) -> Signal:
        """Want the next message from ``source`` under ``tag``."""
        key, signal = (group, source, destination, tag), Signal()
        self._wanted.setdefault(key, deque()).append((tensor, signal))
        self._deliver(key)
        return signal

    def _deliver(self, key: Key) -> None:
        mail, wanted = self._mail.get(key), self._wanted.get(key)
        while mail and wanted:
            tensor, signal = wanted.popleft()
            tensor.copy_(mail.popleft())
            signal.fire()


def _show(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype}"


class _SimulatedPromise(Promise[Any]):
    """Fulfilled at one virtual moment, after which the worker goes on."""

    def __init__(self, communicator: "SimulatedCommunicator", what: str) -> None:
        self._communicator, self._signal, self.what = communicator, Signal(), what
        self._result: Any = None

    def fulfil(self, result: Any) -> None:
        self._result = result
        self._signal.fire()

    def done(self) -> bool:
        if not self._signal.happened:
            self._communicator.polled(self.what)
        return self._signal.happened

    def wait(self) -> Any:
        self._communicator.cluster.wait(self._communicator.rank, self._signal, self.what)
        return self._result


class _SimulatedHandle(Handle[Any]):
    def __init__(
        self, communicator: "SimulatedCommunicator", signal: Signal, result: Any, what: str
    ):
        self._communicator, self._signal, self._result = communicator, signal, result
        self._what = what

    def done(self) -> bool:
        if self._signal.happened:
            return True
        self._communicator.polled(self._what)
        return self._signal.happened

    def wait(self) -> Any:
        cluster = self._communicator.cluster
        cluster.wait(self._communicator.rank, self._signal, self._what)
        return self._result


class SimulatedCommunicator(Communicator):
    """One worker's end of the simulated cluster. Sums are taken in rank order.

    Args:
        cluster: What the workers share.
        rank: This worker.
        group: Collectives meet within a group of this number, in the order of their start.
    """

    overlaps_backward = False  # a step's compute time is charged as a whole, when it has ended

    def __init__(self, cluster: SimulatedCluster, rank: int, group: int = 0) -> None:
        self.cluster, self.rank, self.size, self._group = cluster, rank, cluster.size, group
        self.totals: list[Callable[[], object]] = []
        self._polls, self._asked_seconds, self._nap = 0, 0.0, _SHORTEST_NAP_SECONDS
        self._twins = 0

    def now(self) -> float:
        """Virtual seconds."""
        return self.cluster.workers.kernel.now

    def computed(self) -> None:
        """Charge the compute time of a step."""
        self.cluster.compute_step(self.rank)

    def watch(self, totals: Callable[[], object]) -> None:
        """Keep it for ``Simulation.stats``."""
        self.totals.append(totals)

    def polled(self, what: str) -> None:
        """Somebody asked in vain. Asking takes no time, but who asks on and on lets time pass."""
        if self.now() > self._asked_seconds:
            self._polls, self._nap = 0, _SHORTEST_NAP_SECONDS
        self._polls += 1
        if self._polls == _POLLS:
            self.cluster.nap(self.rank, self._nap, what)
            self._polls, self._nap = 0, min(2 * self._nap, _LONGEST_NAP_SECONDS)
        self._asked_seconds = self.now()

    def collective(
        self,
        kind: Kind,
        tensor: Tensor,
        what: str,
        combine: Callable[[Sequence[Tensor]], Any],
        place: Callable[[Any], object],
        result: Any = None,
    ) -> Handle[Any]:
        """Start a collective of any kind; see ``SimulatedCluster.join``."""
        signal = self.cluster.join(self._group, self.rank, kind, tensor, what, combine, place)
        return _SimulatedHandle(self, signal, tensor if result is None else result, what)

    def reduce(
        self, tensor: Tensor, add: Callable[[Tensor, Tensor], object], what: str
    ) -> Handle[Tensor]:
        """Start replacing ``tensor`` by the total; ``add`` puts one more worker's into it."""

        def combine(tensors: Sequence[Tensor]) -> Tensor:
            total = tensors[0].clone()
            for one in tensors[1:]:
                add(total, one)
            return total

        return self.collective("reduce", tensor, what, combine, tensor.copy_)

    def sum(self, tensor: Tensor, *, what: str) -> Handle[Tensor]:
        """Ring all-reduce by addition."""
        return self.reduce(tensor, Tensor.add_, what)

    def maximum(self, tensor: Tensor, *, what: str) -> Handle[Tensor]:
        """Ring all-reduce by maximum."""
        return self.reduce(tensor, lambda total, one: torch.maximum(total, one, out=total), what)

    def broadcast(self, tensor: Tensor, *, source: int = 0, what: str) -> Handle[Tensor]:
        """Broadcast along a binomial tree."""
        return self.collective("broadcast", tensor, what, lambda all_: all_[source], tensor.copy_)

    def gather(self, tensor: Tensor, *, what: str) -> Handle[list[Tensor]]:
        """Ring all-gather."""
        parts: list[Tensor] = [torch.empty_like(tensor) for _ in range(self.size)]

        def place(tensors: Sequence[Tensor]) -> None:
            for part, one in zip(parts, tensors, strict=True):
                part.copy_(one)

        return self.collective("gather", tensor, what, list, place, parts)

    def send(self, tensor: Tensor, *, destination: int, tag: int = 0, what: str) -> Handle[Tensor]:
        """A message."""
        signal = self.cluster.send(self._group, self.rank, destination, tag, tensor, what)
        return _SimulatedHandle(self, signal, tensor, what)

    def receive(
        self, tensor: Tensor, *, source: int, tag: int = 0, what: str, patient: bool = False
    ) -> Handle[Tensor]:
        """A message."""
        signal = self.cluster.receive(self._group, source, self.rank, tag, tensor)
        return _SimulatedHandle(self, signal, tensor, what)

    def exchange(self, tensor: Tensor, *, what: str) -> Handle[Tensor]:
        """All-to-all in rounds of pairs."""
        result, rank = torch.empty_like(tensor), self.rank

        def place(tensors: Sequence[Tensor]) -> None:
            torch.cat([one.chunk(self.size)[rank] for one in tensors], out=result)

        return self.collective("exchange", tensor, what, list, place, result)

    def twin(self) -> Communicator:
        """Collectives of another group of the same workers."""
        twins = self.cluster.twins
        number = twins.setdefault((self._group, self._twins), -1 - len(twins))
        self._twins += 1
        return SimulatedCommunicator(self.cluster, self.rank, number)

    def spawn(self, activity: Callable[[], None], *, what: str) -> None:
        """Beside this worker, in virtual time."""
        self.cluster.workers.spawn(activity, what)

    def promise(self, *, what: str) -> Promise[Any]:
        """One whose waiting takes virtual time."""
        return _SimulatedPromise(self, what)
