"""What the communicators of one simulation share: links, messages, collectives, time spent.

The file is long because messages and collectives queue for the same cards.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from offbeat.errors import CommunicationError, CommunicationTimeout, OffbeatError
from offbeat.simulate.compute import Compute
from offbeat.simulate.kernel import Signal
from offbeat.simulate.network import Network
from offbeat.simulate.workers import Workers
from offbeat.transport.costs import (
    all_gather_bytes,
    all_reduce_bytes,
    all_to_all_bytes,
    broadcast_bytes,
)
from offbeat.transport.placeholder_tensors import bytes_of

Collective = Literal["reduce", "broadcast", "gather", "exchange"]
_Address = tuple[int, int, int, int]  # of messages: group, source, destination, tag
NOTICE_SECONDS = 0.05
"""After which the others know that a connection has ended."""


@dataclass(frozen=True)
class Span:
    """What one worker did from ``start`` to ``end`` (virtual seconds).

    ``kind`` is ``compute``, ``wait`` (blocked, outside of which it computes), or ``transfer`` (its
    network card was busy; overlaps the others). ``sent`` and ``received`` are bytes; ``inside``
    says that they stay in a node of several workers.
    """

    rank: int
    kind: Literal["compute", "wait", "transfer"]
    start: float
    end: float
    what: str
    sent: float = 0.0
    received: float = 0.0
    inside: bool = False


class _UnderWay:
    """An operation between some workers that may fail when one of them is lost.

    Attributes:
        parties: They.
        signal: Happens at its end.
        doomed: One of them is lost: it ends no more.
        deliver: Once it cannot but end: gives its result to some of them.
    """

    def __init__(self, parties: Iterable[int], signal: Signal) -> None:
        self.parties, self.signal = frozenset(parties), signal
        self.doomed = False
        self.deliver: Callable[[Iterable[int]], None] | None = None

    @property
    def ends(self) -> bool:
        """Whether its end may still come."""
        return not (self.doomed or self.signal.happened)


class _Collective(_UnderWay):
    """One operation of all workers, from the first that joins to the last that has its result."""

    def __init__(self, kind: Collective, what: str, members: Sequence[int]) -> None:
        super().__init__(members, Signal())
        self.kind, self.what = kind, what
        self.tensors: dict[int, Tensor] = {}
        self.places: dict[int, Callable[[Any], object]] = {}


@dataclass(eq=False)
class Line:
    """What connects the workers of one communicator and its twins.

    Attributes:
        members: The workers, by their ranks there.
        sharing: How many groups like this one use the links of the nodes at the same time.
        gone: Those of them that have left.
        under_way: Operations, where workers may be lost.
    """

    members: tuple[int, ...]
    sharing: int = 1
    gone: set[int] = field(default_factory=set)
    under_way: list[_UnderWay] = field(default_factory=list)


@dataclass
class _Nic:
    """When each direction of a full-duplex network card is free again, virtual seconds."""

    up: float = 0.0
    down: float = 0.0


@dataclass
class SimulatedCluster:
    """Everything the communicators of one simulation share.

    Attributes:
        faulty: Whether workers may be lost: then operations have time-outs.
        scale: ``Host.scale``.
    """

    workers: Workers
    network: Network
    compute: Compute
    seed: int
    faulty: bool = False
    spans: list[Span] = field(default_factory=list)
    scale: float = 1.0

    def __post_init__(self) -> None:
        self.size = len(self.workers.all)  # that begin together
        self._lines: list[Line] = []
        self._dead: set[int] = set()
        self._cuts: list[tuple[int, float, float]] = []  # worker, from, to
        # By rank: its share of what joins its node with others, and its link inside the node.
        self._nics: dict[int, _Nic] = defaultdict(_Nic)
        self._inside: dict[int, _Nic] = defaultdict(_Nic)
        self._parts: dict[tuple[int, tuple[int, ...]], Line] = {}
        self._joined: dict[tuple[int, int], int] = {}  # collectives so far, by group and rank
        self._collectives: dict[tuple[int, int], _Collective] = {}
        self._mail: dict[_Address, deque[Tensor]] = {}
        self._wanted: dict[_Address, deque[tuple[Tensor, Signal]]] = {}
        self._steps: dict[int, int] = defaultdict(int)
        self._progress: dict[int, float] = defaultdict(float)  # of the step at hand, charged
        # Numbers of groups made by twin() and part()
        self._numbers: dict[tuple[int, int | tuple[int, ...]], int] = {}

    def compute_step(self, rank: int, progress: float) -> None:
        """Charge the compute time of the worker's next step up to ``progress`` of it; 1 ends it."""
        before, step = self._progress[rank], self._steps[rank]
        self._progress[rank] = 0.0 if progress >= 1 else progress
        self._steps[rank] += progress >= 1
        if progress <= before:  # an earlier part of backward again: nothing to charge
            return
        seconds = self.compute.seconds(rank, step, self.seed) * (progress - before)
        start = self.workers.kernel.now
        try:
            self.workers.sleep(seconds, f"computing step {step + 1}")
        finally:
            self.spans.append(Span(rank, "compute", start, self.workers.kernel.now, "step"))

    def wait(self, rank: int, signal: Signal, what: str) -> None:
        """Block the worker, and remember that it waited."""
        start = self.workers.kernel.now
        try:
            self.workers.wait(signal, what)
        finally:
            self._waited(rank, start, what)

    def _waited(self, rank: int, start: float, what: str) -> None:
        if self.workers.kernel.now > start and not self.workers.current.background:
            self.spans.append(Span(rank, "wait", start, self.workers.kernel.now, what))

    def nap(self, rank: int, seconds: float, what: str) -> None:
        """Let ``seconds`` pass for a worker that polls in a loop; it counts as waiting."""
        start = self.workers.kernel.now
        try:
            self.workers.sleep(seconds, f"polling {what}")
        finally:
            self._waited(rank, start, what)

    def join(
        self,
        line: Line,
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
        key = (group, number)
        if key not in self._collectives:
            self._collectives[key] = _Collective(kind, what, line.members)
            self._begin(line, self._collectives[key])
        operation = self._collectives[key]
        first = next(iter(operation.tensors.items()), (rank, tensor))
        if (operation.kind, first[1].shape, first[1].dtype) != (kind, tensor.shape, tensor.dtype):
            raise OffbeatError(
                f"collective {number}: rank {rank} starts {what} ({kind}, {_show(tensor)}), but "
                f"rank {first[0]} started {operation.what} ({operation.kind}, {_show(first[1])})"
            )
        operation.tensors[rank] = tensor
        operation.places[rank] = place
        if len(operation.tensors) == len(line.members):
            del self._collectives[key]
            if operation.ends:
                self._transfer(operation, line, tensor.nbytes, combine)
        return operation.signal

    def _transfer(
        self,
        operation: _Collective,
        line: Line,
        size_bytes: int,
        combine: Callable[[Sequence[Tensor]], Any],
    ) -> None:
        """All are there: occupy every network card, and deliver at the end."""
        kernel, ranks = self.workers.kernel, line.members
        # Of counterparts in several nodes only the first ones have something to broadcast.
        sharing = 1 if operation.kind == "broadcast" else line.sharing
        nics = self._busy(ranks, sharing)
        start = max(kernel.now, *(max(nic.up, nic.down) for nic in nics))
        network = self.network.at(start)
        seconds, sent = {
            "reduce": (network.all_reduce_seconds, all_reduce_bytes),
            "broadcast": (network.broadcast_seconds, broadcast_bytes),
            "gather": (network.all_gather_seconds, all_gather_bytes),
            "exchange": (network.all_to_all_seconds, all_to_all_bytes),
        }[operation.kind]
        duration = seconds(size_bytes, ranks, sharing)
        each, inside = sent(size_bytes, len(ranks)), not network.crosses(ranks)
        for nic in nics:
            nic.up = nic.down = start + duration
        for rank in ranks:
            span = Span(
                rank, "transfer", start, start + duration, operation.what, each, each, inside
            )
            self.spans.append(span)

        def deliver(to: Iterable[int]) -> None:
            result = combine([operation.tensors[rank] for rank in ranks])
            for rank in to:
                operation.places[rank](result)

        def end() -> None:
            if operation.ends:
                deliver(ranks)
                operation.deliver = None  # a cycle, which would keep the tensors
                operation.signal.fire()

        if self.faulty:
            operation.deliver = deliver
        self._at(start + duration, ranks, end, f"{operation.what} ends")

    def _busy(self, ranks: Sequence[int], sharing: int) -> list[_Nic]:
        """The network cards that a collective of these workers occupies.

        Between nodes those of all workers of the nodes, for they are one link, unless each worker
        has its share of that; inside one node, and of several workers of it, theirs there.
        """
        network = self.network
        if network.workers_per_node == 1 or (sharing > 1 and network.crosses(ranks)):
            return [self._nics[rank] for rank in ranks]
        within = [self._inside[rank] for rank in ranks]
        if not network.crosses(ranks):
            return within
        return [*within, *(nic for rank in ranks for nic in self._link(rank))]

    def _link(self, rank: int) -> list[_Nic]:
        """What joins the node of a worker with others: the shares of all of its workers."""
        workers = self.network.workers_per_node
        first = self.network.node(rank) * workers
        return [self._nics[one] for one in range(first, first + workers)]

    def send(
        self,
        line: Line,
        group: int,
        source: int,
        destination: int,
        tag: int,
        tensor: Tensor,
        what: str,
    ) -> Signal:
        """Start a message; it needs no receiver yet. Ends when the last byte is there.

        It leaves when what was sent before has left, whether or not the receiver's link is busy:
        the switch keeps it until it is its turn there.
        """
        kernel, size_bytes = self.workers.kernel, bytes_of(tensor, self.scale)
        size = float(size_bytes)
        inside = not self.network.crosses((source, destination))
        up, down = (
            [self._inside[rank]] if inside else self._link(rank) for rank in (source, destination)
        )
        latency = self.network.latency_of((source, destination))
        latency = 0.0 if source == destination else latency
        start = max(kernel.now, *(nic.up for nic in up))
        network = self.network.at(start)
        leaving, coming = network.link_seconds(size_bytes, source, destination)
        for nic in up:
            nic.up = start + leaving
        left = start + leaving
        self.spans.append(Span(source, "transfer", start, left, what, sent=size, inside=inside))
        key, arrived = (group, source, destination, tag), Signal()
        message = tensor.detach().clone()
        operation = _UnderWay((source, destination), arrived)
        self._begin(line, operation)

        def arrive() -> None:
            if operation.doomed:
                return
            self._mail.setdefault(key, deque()).append(message)
            arrived.fire()
            self._deliver(key)

        def come_in() -> None:  # when it leaves, so that links are taken in the order of time
            begin = max(kernel.now, *(nic.down for nic in down))
            come = max(begin + coming, start + leaving)
            for nic in down:
                nic.down = come
            end = come + latency
            span = Span(destination, "transfer", begin, end, what, received=size, inside=inside)
            self.spans.append(span)
            self._at(end, (source, destination), arrive, f"{what} arrives at rank {destination}")

        kernel.at(start, come_in, f"{what} leaves rank {source}")
        return arrived

    def receive(
        self, line: Line, group: int, source: int, destination: int, tag: int, tensor: Tensor
    ) -> Signal:
        """Want the next message from ``source`` under ``tag``."""
        key, signal = (group, source, destination, tag), Signal()
        self._wanted.setdefault(key, deque()).append((tensor, signal))
        self._deliver(key)
        self._begin(line, _UnderWay((source, destination), signal))
        return signal

    def _deliver(self, key: _Address) -> None:
        mail, wanted = self._mail.get(key), self._wanted.get(key)
        while mail and wanted:
            tensor, signal = wanted.popleft()
            if not signal.happened:  # else it has failed
                tensor.copy_(mail.popleft())
                signal.fire()

    # -- losses ----------------------------------------------------------------------------------

    def open(self, members: Sequence[int]) -> Line:
        """Connect some workers."""
        line = Line(tuple(members), gone=self._dead & {*members})
        if self.faulty:
            self._lines.append(line)
        return line

    def number(self, group: int, key: int | tuple[int, ...]) -> int:
        """Of a group made out of another one, the same for all of its workers."""
        return self._numbers.setdefault((group, key), -1 - len(self._numbers))

    def part(self, group: int, members: tuple[int, ...], sharing: int) -> Line:
        """Connect some workers of a group; the same line for all of them."""
        if (group, members) not in self._parts:
            self._parts[group, members] = self.open(members)
            self._parts[group, members].sharing = sharing
        return self._parts[group, members]

    def leave(self, line: Line, member: int, spared: Iterable[int] = ()) -> None:
        """A worker's connections end: what is under way with it fails, here and on the others.

        Args:
            line: Which connections.
            member: The worker.
            spared: Workers for whom collectives end all the same to which everybody had come.
        """
        if member not in line.members or member in line.gone:
            return
        line.gone.add(member)
        lost = [one for one in line.under_way if member in one.parties and one.ends]
        for one in lost:
            one.doomed = True
        self._tell(line, lost, frozenset(spared))

    def lose(self, member: int, spared: Iterable[int] = ()) -> None:
        """A worker's process has ended, and with it all its connections."""
        self._dead.add(member)
        for line in self._lines:
            self.leave(line, member, spared)

    def limit(self, signal: Signal, seconds: float, what: str) -> None:
        """Let what a worker waits for fail after so long."""
        if not signal.happened:
            text = (
                f"no answer. The time-out is timeout_seconds={seconds:g}: raise it in "
                "attach(..., timeout_seconds=...) if a worker may be that much slower"
            )
            end = self.workers.kernel.now + seconds
            failure = CommunicationTimeout(text)
            self.workers.kernel.at(end, lambda: signal.fail(failure), f"{what} times out")

    def cut(self, member: int, seconds: float) -> None:
        """From now on nothing reaches a worker or leaves it, for so long."""
        self._cuts.append((member, self.workers.kernel.now, self.workers.kernel.now + seconds))

    def cut_until(self, members: Iterable[int]) -> float:
        """When messages between these workers arrive that would arrive now."""
        now, some = self.workers.kernel.now, frozenset(members)
        return max((to for one, start, to in self._cuts if one in some and start <= now), default=0)

    def _at(
        self, seconds: float, parties: Sequence[int], action: Callable[[], None], label: str
    ) -> None:
        """Let something arrive, or later, if one of the ``parties`` is cut off by then."""
        kernel = self.workers.kernel
        if not self.faulty:
            return kernel.at(seconds, action, label)

        def arrive() -> None:
            later = self.cut_until(parties)
            if later > kernel.now:
                kernel.at(later, arrive, label)
            else:
                action()

        kernel.at(seconds, arrive, label)

    def _begin(self, line: Line, operation: _UnderWay) -> None:
        if self.faulty and operation.ends:
            line.under_way = [one for one in line.under_way if one.ends]
            line.under_way.append(operation)
            if line.gone & operation.parties:
                operation.doomed = True
                self._tell(line, [operation], frozenset())

    def _tell(self, line: Line, lost: Sequence[_UnderWay], spared: frozenset[int]) -> None:
        """The workers notice that operations have failed."""
        kernel = self.workers.kernel

        def notice() -> None:
            ranks = sorted(line.members.index(member) for member in line.gone)
            gone = ", ".join(map(str, ranks))
            text = f"lost the connection to rank {gone}, which died, gave up or was cut off"
            for one in lost:
                some = spared & one.parties if one.deliver is not None else frozenset()
                if one.deliver is not None and not one.signal.happened:
                    one.deliver(sorted(some))
                one.signal.fail(CommunicationError(text), spared=some)

        kernel.at(kernel.now + NOTICE_SECONDS, notice, "a loss is noticed")


def _show(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype}"
