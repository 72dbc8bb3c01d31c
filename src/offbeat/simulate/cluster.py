"""State that the communicators of one simulation share: clock, links, messages, collectives.

Messages and collectives are in one module because they queue for the same network cards.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from offbeat.errors import OffbeatError
from offbeat.simulate.compute import Compute
from offbeat.simulate.connections import Connections, Group, PendingOperation
from offbeat.simulate.kernel import Signal
from offbeat.simulate.network import CollectiveKind, Network, sent_bytes
from offbeat.simulate.workers import Workers
from offbeat.transport.placeholder_tensors import bytes_of

_Address = tuple[int, int, int, int]  # of messages: context, source, destination, tag


@dataclass(frozen=True)
class Span:
    """One activity of one worker.

    Attributes:
        rank: Rank of the worker.
        kind: ``compute``; ``wait`` (the worker was blocked); or ``transfer`` (its network card was
            busy, which overlaps with the others).
        start: Start, virtual seconds.
        end: End, virtual seconds.
        what: Name of the activity.
        sent: Bytes sent.
        received: Bytes received.
        inside: True if the bytes stayed inside a node of several workers.
    """

    rank: int
    kind: Literal["compute", "wait", "transfer"]
    start: float
    end: float
    what: str
    sent: float = 0.0
    received: float = 0.0
    inside: bool = False


@dataclass(frozen=True, eq=False)
class Contribution:
    """One worker's part of a collective.

    Attributes:
        kind: Kind of the collective.
        what: Name in errors and in the timeline.
        tensor: Tensor that the worker contributes.
        size_bytes: Bytes that the tensor stands for.
        combine: Computes the result, once, from the tensors of all workers in rank order. It must
            not change them.
        store: Stores the result on this worker.
    """

    kind: CollectiveKind
    what: str
    tensor: Tensor
    size_bytes: float
    combine: Callable[[Sequence[Tensor]], Any]
    store: Callable[[Any], object]

    @property
    def signature(self) -> tuple[object, ...]:
        """Properties that must be the same on all workers."""
        return self.kind, self.tensor.shape, self.tensor.dtype

    def __str__(self) -> str:
        return f"{self.what} ({self.kind}, {tuple(self.tensor.shape)} {self.tensor.dtype})"


class EndSignal(Signal):
    """The end of a collective.

    Attributes:
        seconds: Virtual time of the end; infinite until every worker has joined.
    """

    seconds: float = float("inf")


class PendingCollective(PendingOperation):
    """A collective, from the first worker that joins it to its end.

    Attributes:
        signal: The end.
        contributions: What each worker contributes, by global rank.
    """

    signal: EndSignal

    def __init__(self, members: Sequence[int]) -> None:
        super().__init__(members, EndSignal())
        self.contributions: dict[int, Contribution] = {}

    def finish(self, ranks: Sequence[int], stored_on: Iterable[int]) -> None:
        """Combine the tensors of ``ranks`` and store the result on the workers ``stored_on``."""
        contributions = [self.contributions[rank] for rank in ranks]
        result = contributions[0].combine([one.tensor for one in contributions])
        for rank in stored_on:
            self.contributions[rank].store(result)


@dataclass
class _NetworkCard:
    """Virtual times at which each direction of a full-duplex network card is free again."""

    up: float = 0.0
    down: float = 0.0


@dataclass
class SimulatedCluster:
    """State that the communicators of one simulation share.

    Attributes:
        workers: The simulated workers.
        network: The links.
        compute: The compute time of steps.
        seed: Seed of the compute jitter.
        faulty: True if workers may be lost. Operations then have time-outs.
        spans: Activities of all workers so far.
        scale: ``Host.scale``.
        connections: Groups of connected workers, and failures.
        size: Number of workers that start together.
    """

    workers: Workers
    network: Network
    compute: Compute
    seed: int
    faulty: bool = False
    spans: list[Span] = field(default_factory=list)
    scale: float = 1.0

    def __post_init__(self) -> None:
        self.size = len(self.workers.all)
        self.connections = Connections(self.workers.kernel, faulty=self.faulty)
        # By rank: the worker's share of the link of its node, and its link inside the node.
        self._cards: dict[int, _NetworkCard] = defaultdict(_NetworkCard)
        self._inside: dict[int, _NetworkCard] = defaultdict(_NetworkCard)
        self._joined: dict[tuple[int, int], int] = {}  # collectives so far, by context and rank
        self._collectives: dict[tuple[int, int], PendingCollective] = {}
        self._mail: dict[_Address, deque[Tensor]] = {}
        self._receivers: dict[_Address, deque[tuple[Tensor, Signal]]] = {}
        self._steps: dict[int, int] = defaultdict(int)  # completed, by rank
        self._progress: dict[int, float] = defaultdict(float)  # in the current step, by rank

    # -- computing and waiting -------------------------------------------------------------------

    def compute_step(self, rank: int, progress: float) -> None:
        """Let the worker compute until its step has made ``progress``, in (0, 1]; 1 ends it."""
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
        """Block the worker until ``signal`` and record a wait."""
        start = self.workers.kernel.now
        try:
            self.workers.wait(signal, what)
        finally:
            self._record_wait(rank, start, what)

    def idle(self, rank: int, seconds: float, what: str) -> None:
        """Let ``seconds`` pass for a worker that sleeps or polls, and record a wait."""
        start = self.workers.kernel.now
        try:
            self.workers.sleep(seconds, f"polling {what}")
        finally:
            self._record_wait(rank, start, what)

    def _record_wait(self, rank: int, start: float, what: str) -> None:
        if self.workers.kernel.now > start and not self.workers.current.background:
            self.spans.append(Span(rank, "wait", start, self.workers.kernel.now, what))

    # -- collectives -----------------------------------------------------------------------------

    def join(self, group: Group, context: int, rank: int, contribution: Contribution) -> EndSignal:
        """Join the next collective of the context. Return the signal of its end."""
        number = self._joined.get((context, rank), 0)
        self._joined[context, rank] = number + 1
        key = (context, number)
        if key not in self._collectives:
            self._collectives[key] = PendingCollective(group.members)
            self.connections.track(group, self._collectives[key])
        operation = self._collectives[key]
        first_rank, first = next(iter(operation.contributions.items()), (rank, contribution))
        if first.signature != contribution.signature:
            raise OffbeatError(
                f"collective {number}: rank {rank} starts {contribution}, but "
                f"rank {first_rank} started {first}"
            )
        operation.contributions[rank] = contribution
        if len(operation.contributions) == len(self.participants(group)):
            del self._collectives[key]
            if operation.can_succeed:
                self._transfer(operation, group, first)
        return operation.signal

    def participants(self, group: Group) -> Sequence[int]:
        """Return the members of ``group`` that join its collectives."""
        return group.members

    def _transfer(
        self, operation: PendingCollective, group: Group, contribution: Contribution
    ) -> None:
        """Occupy the network cards of all members and deliver the result at the end."""
        kernel, ranks = self.workers.kernel, group.members
        # A broadcast between counterparts in several nodes is sent by the first group alone.
        sharing = 1 if contribution.kind == "broadcast" else group.sharing
        cards = self._cards_of_collective(ranks, sharing)
        start = max(kernel.now, *(max(card.up, card.down) for card in cards))
        network = self.network.at(start)
        kind, size, what = contribution.kind, contribution.size_bytes, contribution.what
        end = start + network.collective_seconds(kind, size, ranks, sharing)
        operation.signal.seconds = end
        each, inside = sent_bytes(kind, size, len(ranks)), not network.crosses(ranks)
        for card in cards:
            card.up = card.down = end
        for rank in ranks:
            self.spans.append(Span(rank, "transfer", start, end, what, each, each, inside))

        def finish() -> None:
            if operation.can_succeed:
                operation.finish(ranks, ranks)
                operation.deliver = None  # a reference cycle, which would keep the tensors
                operation.signal.fire()

        if self.faulty:
            operation.deliver = lambda spared: operation.finish(ranks, spared)
        self.connections.deliver_at(end, ranks, finish, f"{what} ends")

    def _cards_of_collective(self, ranks: Sequence[int], sharing: int) -> list[_NetworkCard]:
        """Return the network cards that a collective of ``ranks`` occupies.

        Inside one node: the workers' links in the node. Between nodes: these, and the shares of all
        workers of the nodes, because together they are the node's link. A group that shares the
        link with counterparts (``sharing`` > 1) occupies only the shares of its own workers.
        """
        network = self.network
        if network.workers_per_node == 1 or (sharing > 1 and network.crosses(ranks)):
            return [self._cards[rank] for rank in ranks]
        within = [self._inside[rank] for rank in ranks]
        if not network.crosses(ranks):
            return within
        return [*within, *(card for rank in ranks for card in self._node_link(rank))]

    def _node_link(self, rank: int) -> list[_NetworkCard]:
        """Return the link of the worker's node: the shares of all of its workers."""
        workers = self.network.workers_per_node
        first = self.network.node(rank) * workers
        return [self._cards[one] for one in range(first, first + workers)]

    # -- messages --------------------------------------------------------------------------------

    def send(
        self, group: Group, context: int, route: tuple[int, int, int], tensor: Tensor, what: str
    ) -> Signal:
        """Start a message. Return the signal of its arrival.

        The message needs no receiver yet. It leaves once earlier messages have left the sender's
        card, even if the receiver's link is busy: the switch stores it until that link is free.

        Args:
            group: The connected workers.
            context: Context of the communicator.
            route: Global rank of the sender, global rank of the receiver, tag.
            tensor: Content of the message.
            what: Name in the timeline.
        """
        source, destination, _ = route
        kernel, size_bytes = self.workers.kernel, bytes_of(tensor, self.scale)
        size = float(size_bytes)
        inside = not self.network.crosses((source, destination))
        up, down = (
            [self._inside[rank]] if inside else self._node_link(rank)
            for rank in (source, destination)
        )
        latency = self.network.latency_of((source, destination))
        latency = 0.0 if source == destination else latency
        start = max(kernel.now, *(card.up for card in up))
        network = self.network.at(start)
        sending, receiving = network.link_seconds(size_bytes, source, destination)
        left = start + sending
        for card in up:
            card.up = left
        self.spans.append(Span(source, "transfer", start, left, what, sent=size, inside=inside))
        key, arrived = (context, *route), Signal()
        message = tensor.detach().clone()
        operation = PendingOperation((source, destination), arrived)
        self.connections.track(group, operation)

        def arrive() -> None:
            if operation.doomed:
                return
            self._mail.setdefault(key, deque()).append(message)
            arrived.fire()
            self._hand_over(key)

        # The receiver's link is taken when the message leaves, so that messages take links in the
        # order of virtual time.
        def occupy_receiver() -> None:
            begin = max(kernel.now, *(card.down for card in down))
            received = max(begin + receiving, start + sending)
            for card in down:
                card.down = received
            end = received + latency
            span = Span(destination, "transfer", begin, end, what, received=size, inside=inside)
            self.spans.append(span)
            label = f"{what} arrives at rank {destination}"
            self.connections.deliver_at(end, (source, destination), arrive, label)

        kernel.at(start, occupy_receiver, f"{what} leaves rank {source}")
        return arrived

    def receive(
        self, group: Group, context: int, route: tuple[int, int, int], tensor: Tensor
    ) -> Signal:
        """Receive the next message of ``route`` into ``tensor``; see ``send``."""
        key, signal = (context, *route), Signal()
        self._receivers.setdefault(key, deque()).append((tensor, signal))
        self._hand_over(key)
        self.connections.track(group, PendingOperation(route[:2], signal))
        return signal

    def _hand_over(self, key: _Address) -> None:
        """Copy arrived messages into the tensors of the receivers that wait for them."""
        mail, receivers = self._mail.get(key), self._receivers.get(key)
        while mail and receivers:
            tensor, signal = receivers.popleft()
            if not signal.happened:  # else it has failed
                tensor.copy_(mail.popleft())
                signal.fire()
