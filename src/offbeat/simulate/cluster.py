"""What the communicators of one simulation share: links, messages, collectives, time spent."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from offbeat.costs import all_gather_bytes, all_reduce_bytes, all_to_all_bytes, broadcast_bytes
from offbeat.errors import OffbeatError
from offbeat.simulate.compute import Compute
from offbeat.simulate.kernel import Signal
from offbeat.simulate.network import Network
from offbeat.simulate.workers import Workers

Collective = Literal["reduce", "broadcast", "gather", "exchange"]
_Address = tuple[int, int, int, int]  # of messages: group, source, destination, tag


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

    def __init__(self, kind: Collective, what: str) -> None:
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
        self._mail: dict[_Address, deque[Tensor]] = {}
        self._wanted: dict[_Address, deque[tuple[Tensor, Signal]]] = {}
        self._steps = [0] * self.size
        self._progress = [0.0] * self.size  # how much of the step at hand is charged
        self.twins: dict[tuple[int, int], int] = {}  # numbers of groups made by twin()

    def compute_step(self, rank: int, progress: float) -> None:
        """Charge the compute time of the worker's next step up to ``progress`` of it; 1 ends it."""
        before, step = self._progress[rank], self._steps[rank]
        self._progress[rank] = 0.0 if progress >= 1 else progress
        self._steps[rank] += progress >= 1
        if progress <= before:  # an earlier part of backward again: nothing to charge
            return
        seconds = self.compute.seconds(rank, step, self.seed) * (progress - before)
        start = self.workers.kernel.now
        self.workers.sleep(seconds, f"computing step {step + 1}")
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
        if not self.workers.current.background:
            self.spans.append(Span(rank, "wait", start, self.workers.kernel.now, what))

    def join(
        self,
        group: int,
        rank: int,
        kind: Collective,
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

    def _deliver(self, key: _Address) -> None:
        mail, wanted = self._mail.get(key), self._wanted.get(key)
        while mail and wanted:
            tensor, signal = wanted.popleft()
            tensor.copy_(mail.popleft())
            signal.fire()


def _show(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype}"
