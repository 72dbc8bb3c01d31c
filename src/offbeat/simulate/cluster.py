"""The simulated cluster: it times computing, messages and collectives, and delivers their results.

All times are *virtual time*, the time of the simulator's clock. The communicators of all workers
share one ``SimulatedCluster``. Each communicator belongs to a *group* of connected workers. It has
a *context*: a number that separates its operations from those of other communicators, as in MPI.
Messages and collectives are in one module because they queue for the same network cards.
"""

import contextlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from offbeat.errors import OffbeatError
from offbeat.simulate.compute import Compute
from offbeat.simulate.connections import Connections, Group, PendingOperation
from offbeat.simulate.kernel import Signal
from offbeat.simulate.network import CollectiveKind, Network
from offbeat.simulate.workers import Workers

_Address = tuple[int, int, int, int]  # context, source, destination and tag of a message


@dataclass(frozen=True)
class Span:
    """One activity of one worker.

    Attributes:
        rank: Rank of the worker.
        kind: ``compute``; ``wait``, while the worker is blocked; or ``transfer``, while its network
            card is busy. Transfers overlap with computing and waiting.
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
    """One worker's input to a collective.

    Attributes:
        what: Name in errors and in the timeline.
        tensor: This worker's tensor.
        combine: Function that computes the result from the tensors of all workers, in rank order.
            It must not change the tensors. It is called on one worker only.
        store: Function that stores the result on this worker.
    """

    kind: CollectiveKind
    what: str
    tensor: Tensor
    combine: Callable[[Sequence[Tensor]], Any]
    store: Callable[[Any], object]

    @property
    def signature(self) -> tuple[object, ...]:
        """Kind, shape and dtype. They must be the same on all workers."""
        return self.kind, self.tensor.shape, self.tensor.dtype

    def __str__(self) -> str:
        return f"{self.what} ({self.kind}, {tuple(self.tensor.shape)} {self.tensor.dtype})"


class PendingCollective(PendingOperation):
    """A collective that at least one worker has joined.

    Attributes:
        contributions: Inputs of the workers that have joined, by global rank.
    """

    def __init__(self, members: Sequence[int]) -> None:
        super().__init__(members, Signal())
        self.contributions: dict[int, Contribution] = {}

    def finish(self, ranks: Sequence[int], stored_on: Iterable[int]) -> None:
        """Combine the tensors of ``ranks`` and store the result on the workers ``stored_on``."""
        contributions = [self.contributions[rank] for rank in ranks]
        result = contributions[0].combine([each.tensor for each in contributions])
        for rank in stored_on:
            self.contributions[rank].store(result)


@dataclass
class _NetworkCard:
    """Virtual times at which the two directions of a full-duplex network card become free."""

    up: float = 0.0
    down: float = 0.0


@dataclass
class SimulatedCluster:
    """The cluster of one simulation: its network cards, messages, collectives and computing.

    Attributes:
        seed: Seed of the compute jitter.
        faulty: True if the run has faults, such as lost workers.
        spans: Activities of all workers so far.
        totals: By rank: function that returns the totals (``Stats``) of the worker's last training.
        connections: Groups of connected workers, and the failures of their connections.
        size: Number of workers at the start.
    """

    workers: Workers
    network: Network
    compute: Compute
    seed: int
    faulty: bool = False
    spans: list[Span] = field(default_factory=list)
    totals: dict[int, Callable[[], object]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.size = len(self.workers.all)
        self.connections = Connections(self.workers.kernel, faulty=self.faulty)
        # Links to the switch, by rank. A node has one link: the cards of all its workers together.
        self._cards: dict[int, _NetworkCard] = defaultdict(_NetworkCard)
        self._inside: dict[int, _NetworkCard] = defaultdict(_NetworkCard)  # links inside nodes
        self._joined: dict[tuple[int, int], int] = {}  # collectives so far, by context and rank
        self._collectives: dict[tuple[int, int], PendingCollective] = {}
        self._mail: dict[_Address, deque[Tensor]] = {}
        self._receivers: dict[_Address, deque[tuple[Tensor, Signal]]] = {}
        self._steps: dict[int, int] = defaultdict(int)  # completed steps, by rank
        self._progress: dict[int, float] = defaultdict(float)  # share of the current step, by rank

    # -- computing and waiting -------------------------------------------------------------------

    def compute_step(self, rank: int, progress: float) -> None:
        """Let the worker compute until the share ``progress`` of its step is done.

        ``progress`` is in (0, 1]; 1 ends the step.
        """
        before, step = self._progress[rank], self._steps[rank]
        if progress <= before:  # a repeated backward pass: its time is counted once
            return
        self._progress[rank] = 0.0 if progress >= 1 else progress
        self._steps[rank] += progress >= 1
        now = self.workers.kernel.now
        seconds = self.compute.seconds(rank, step, now, self.seed) * (progress - before)
        with self._recorded(rank, "compute", "step"):
            self.workers.sleep(seconds, f"computing step {step + 1}")

    def wait(self, rank: int, signal: Signal, what: str) -> None:
        """Block the worker until ``signal`` fires, and record the wait."""
        with self._recorded(rank, "wait", what):
            self.workers.wait(signal, what)

    def idle(self, rank: int, seconds: float, what: str) -> None:
        """Let the worker wait for ``seconds``, and record the wait."""
        with self._recorded(rank, "wait", what):
            self.workers.sleep(seconds, f"polling {what}")

    @contextlib.contextmanager
    def _recorded(self, rank: int, kind: Literal["compute", "wait"], what: str) -> Iterator[None]:
        """Record what a worker does in the ``with`` block. Background activities have no spans."""
        kernel, start = self.workers.kernel, self.workers.kernel.now
        try:
            yield
        finally:
            if kernel.now > start and not self.workers.current.background:
                self.spans.append(Span(rank, kind, start, kernel.now, what))

    # -- collectives -----------------------------------------------------------------------------

    def join(self, group: Group, context: int, rank: int, contribution: Contribution) -> Signal:
        """Let a worker join the next collective of ``context``. Return its end signal.

        Raises:
            OffbeatError: Kind, shape or dtype is not the same as on the first worker that joined.
        """
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
        if len(operation.contributions) == len(group.members):
            del self._collectives[key]
            if operation.can_succeed:
                self._transfer(operation, group, first)
        return operation.signal

    def _transfer(
        self, operation: PendingCollective, group: Group, contribution: Contribution
    ) -> None:
        """Occupy the network cards, and schedule the delivery of the result."""
        kernel, ranks = self.workers.kernel, group.members
        # Between nodes, only the group of the nodes' first workers runs a broadcast. So this group
        # has the whole links of the nodes.
        sharing = 1 if contribution.kind == "broadcast" else group.sharing
        cards = self._cards_of_collective(ranks, sharing)
        start = max(kernel.now, *(max(card.up, card.down) for card in cards))
        kind, size, what = contribution.kind, contribution.tensor.nbytes, contribution.what
        seconds, sent = self.network.collective_cost(kind, size, ranks, sharing, start)
        end, inside = start + seconds, not self.network.crosses(ranks)
        for card in cards:
            card.up = card.down = end
        for rank in ranks:
            self.spans.append(Span(rank, "transfer", start, end, what, sent, sent, inside))

        def finish() -> None:
            if operation.can_succeed:
                operation.finish(ranks, ranks)
                operation.deliver = None  # breaks a reference cycle that would keep the tensors
                operation.signal.fire()

        if self.faulty:
            operation.deliver = lambda spared: operation.finish(ranks, spared)
        self.workers.kernel.at(end, finish, f"{what} ends")

    def _cards_of_collective(self, ranks: Sequence[int], sharing: int) -> list[_NetworkCard]:
        """Return the network cards that a collective of ``ranks`` occupies.

        A collective inside a node occupies the links inside the node. A collective across nodes
        also occupies the links of the nodes. If ``sharing`` > 1 such groups run at the same time,
        each occupies only the cards of its own workers, which are shares of those links.
        """
        inside = [self._inside[rank] for rank in ranks]
        if not self.network.crosses(ranks):
            return inside
        if sharing > 1:
            return [self._cards[rank] for rank in ranks]
        return [*inside, *(card for rank in ranks for card in self._node_link(rank))]

    def _node_link(self, rank: int) -> list[_NetworkCard]:
        """Return the cards of all workers of the node of ``rank``: together, the node's link."""
        workers = self.network.workers_per_node
        first = self.network.node(rank) * workers
        return [self._cards[member] for member in range(first, first + workers)]

    # -- messages --------------------------------------------------------------------------------

    def send(
        self, group: Group, context: int, route: tuple[int, int, int], tensor: Tensor, what: str
    ) -> Signal:
        """Start a message. Return the signal of its arrival.

        The message waits until the sender's link is free. The switch then stores it until the
        receiver's link is free. It may arrive before the receiver calls ``receive``. ``route`` is
        (global rank of the sender, global rank of the receiver, tag).
        """
        source, destination, _ = route
        kernel, size = self.workers.kernel, float(tensor.nbytes)
        inside = not self.network.crosses((source, destination))
        up, down = (
            [self._inside[rank]] if inside else self._node_link(rank)
            for rank in (source, destination)
        )
        start = max(kernel.now, *(card.up for card in up))
        sending, receiving, latency = self.network.message_seconds(size, source, destination, start)
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

        # Called when the transmission starts, not now. So all messages to a receiver occupy its
        # link in the order of virtual time.
        def occupy_receiver() -> None:
            begin = max(kernel.now, *(card.down for card in down))
            received = max(begin + receiving, start + sending)
            for card in down:
                card.down = received
            end = received + latency
            span = Span(destination, "transfer", begin, end, what, received=size, inside=inside)
            self.spans.append(span)
            kernel.at(end, arrive, f"{what} arrives at rank {destination}")

        kernel.at(start, occupy_receiver, f"{what} leaves rank {source}")
        return arrived

    def receive(
        self, group: Group, context: int, route: tuple[int, int, int], tensor: Tensor
    ) -> Signal:
        """Receive the next message on ``route`` into ``tensor``. Return the signal of the end."""
        key, signal = (context, *route), Signal()
        self._receivers.setdefault(key, deque()).append((tensor, signal))
        self._hand_over(key)
        self.connections.track(group, PendingOperation(route[:2], signal))
        return signal

    def _hand_over(self, key: _Address) -> None:
        """Copy arrived messages into the tensors that wait for them."""
        mail, receivers = self._mail.get(key), self._receivers.get(key)
        while mail and receivers:
            tensor, signal = receivers.popleft()
            if not signal.happened:  # otherwise this receive has failed
                tensor.copy_(mail.popleft())
                signal.fire()
