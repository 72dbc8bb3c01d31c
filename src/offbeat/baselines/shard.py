"""One shard of a parameter server: values, update rule, clocks and waiting requests.

This module does not communicate. ``shard_service`` receives requests of other ranks, calls the
shard and sends its answers.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from offbeat.errors import OffbeatError

NO_CLOCK = 2**62
"""Clock of a worker that no other worker waits for."""

RequestKind = Literal["push", "pull", "push_pull", "clock", "release", "barrier", "wait", "leave"]
_KINDS: tuple[RequestKind, ...] = get_args(RequestKind)


@dataclass(frozen=True)
class Request:
    """A worker's request to one shard.

    Attributes:
        kind: Kind of the request. "push" sends values, "pull" requests values, "push_pull" does
            both. "clock" requests the minimum clock. "release" makes the shard answer the waiting
            requests of this worker at once. "barrier" reports that the worker has reached the
            barrier, and "wait" that it still waits there. "leave" is the last request.
        source: Rank of the worker.
        clock: New clock of this worker. −1 leaves it unchanged.
        min_clock: Minimum clock of the workers for which the answer waits.
    """

    kind: RequestKind
    source: int
    clock: int = -1
    min_clock: int = -NO_CLOCK

    NUMBERS: ClassVar[int] = 3  # length of an encoded request

    @property
    def pushes(self) -> bool:
        """True if values follow the request."""
        return self.kind in ("push", "push_pull")

    @property
    def pulls(self) -> bool:
        """True if the answer contains values."""
        return self.kind in ("pull", "push_pull")

    @property
    def answered(self) -> bool:
        """True if the shard answers."""
        return self.kind not in ("push", "release", "leave")

    def encode(self) -> Tensor:
        """Return the request as int64 numbers. The receiver knows ``source`` by the connection."""
        return torch.tensor([_KINDS.index(self.kind), self.clock, self.min_clock])

    @classmethod
    def decode(cls, header: Tensor, source: int) -> "Request":
        """Decode a request of rank ``source``.

        Raises:
            OffbeatError: the numbers are not a request.
        """
        kind, clock, min_clock = header.tolist()
        if not 0 <= kind < len(_KINDS):
            raise OffbeatError(
                f"rank {source} sent a message that is not a request to a parameter server: "
                f"{header.tolist()}. Check that all workers run the same version of offbeat"
            )
        return cls(_KINDS[kind], source, clock, min_clock)


class Answer(NamedTuple):
    """The answer to a request, without its values.

    Attributes:
        clock: Minimum clock of the workers that are not waiting at a barrier. ``NO_CLOCK`` if all
            are. In the answer to a completed barrier, the minimum clock of all workers.
        reached: True if all workers have reached the barrier.
    """

    clock: int
    reached: bool = False


@dataclass(eq=False)
class Rule:
    """The update rule of a shard, which applies pushes. This base class adds: z ← z + values.

    A rule must be element-wise, because a shard holds only a part of the vector. It is a dataclass
    whose fields a checkpoint saves. The shard calls it with its lock held.
    """

    def push(self, shard: Tensor, values: Tensor, *, source: int) -> None:
        """Apply the values that rank ``source`` has pushed to ``shard``, in place."""
        shard.add_(values)

    def clock_advanced(self, shard: Tensor) -> None:
        """Handle a rise of the minimum clock, or a completed barrier.

        Called before the shard answers the requests that wait for it.
        """

    def answer(self, shard: Tensor, *, source: int) -> Tensor:
        """Return the values that answer a "push_pull". The caller copies them."""
        return shard


Deliver = Callable[[Answer, Tensor | None], None]
"""Function that receives the answer to a request, and the values if the request pulls."""


@dataclass(eq=False)
class Shard:
    """One part of the vector, and the state of each worker's requests.

    The shard handles requests in the order of the calls. After each request it answers all waiting
    requests whose condition holds, the oldest first.

    Attributes:
        values: The values, 1-D.
        rule: The update rule.
        clocks: Clock of each worker.
        pushes: Number of applied pushes.
        behind: Staleness of each worker: the number of pushes by other workers since its last pull.
        staleness: Histogram of the staleness of pushes: number of pushes by staleness.
        reached_clock: Minimum clock after the last request.
    """

    values: Tensor
    rule: Rule
    clocks: list[int]
    pushes: int = 0
    behind: list[int] = field(default_factory=list)
    staleness: dict[int, int] = field(default_factory=dict)
    reached_clock: int = 0

    def __post_init__(self) -> None:
        self.behind = [0] * len(self.clocks)
        self._at_barrier = [False] * len(self.clocks)
        self._barrier_clock = 0  # minimum clock at the last completed barrier
        self._received = 0  # number of requests other than "wait"
        # Requests that were not answered, each with ``_received`` at its arrival.
        self._waiting: list[tuple[Request, int, Deliver]] = []
        self._lock = threading.Lock()
        self.reached_clock = self._min_clock()

    def _min_clock(self) -> int:
        clocks = zip(self.clocks, self._at_barrier, strict=True)
        return min((clock for clock, waits in clocks if not waits), default=NO_CLOCK)

    def handle(self, request: Request, values: Tensor | None, deliver: Deliver) -> None:
        """Handle one request, and answer the requests that were waiting for it.

        Args:
            request: The request.
            values: The pushed values. None if the request does not push. Not kept.
            deliver: Function that receives the answer, now or during a later call.
        """
        with self._lock:
            source = request.source
            if values is not None:
                self._push(values, source)
            if request.clock >= 0:
                self.clocks[source] = request.clock
            completed = request.kind == "barrier" and self._arrive(source)
            self._received += request.kind != "wait"
            if request.answered:
                self._waiting.append((request, self._received, deliver))
            clock = self._min_clock()
            if clock > self.reached_clock or completed:
                self.rule.clock_advanced(self.values)
            self.reached_clock = clock
            # A worker at a barrier does not wait for clocks, which might never be reached.
            released = source if request.kind in ("release", "barrier") else None
            self._waiting = [one for one in self._waiting if not self._answer(*one, released)]

    def _push(self, values: Tensor, source: int) -> None:
        behind = self.behind[source]
        self.staleness[behind] = self.staleness.get(behind, 0) + 1
        self.behind = [n + (rank != source) for rank, n in enumerate(self.behind)]
        self.rule.push(self.values, values, source=source)
        self.pushes += 1

    def _arrive(self, source: int) -> bool:
        """Record that a worker has reached the barrier. Return True if it is the last one."""
        self._at_barrier[source] = True
        if not all(self._at_barrier):
            return False
        self._at_barrier = [False] * len(self.clocks)
        self._barrier_clock = self._min_clock()
        return True

    def _answer(
        self, request: Request, received: int, deliver: Deliver, released: int | None
    ) -> bool:
        """Answer a waiting request if its condition holds. Return True if it was answered."""
        if request.kind in ("barrier", "wait"):
            if not self._at_barrier[request.source]:
                # The clock at the barrier: some workers may have continued since then.
                deliver(Answer(self._barrier_clock, reached=True), None)
                return True
            if self._received > received:  # another worker is alive; this one asks again
                deliver(Answer(self.reached_clock), None)
                return True
            return False
        if self.reached_clock < request.min_clock and request.source != released:
            return False
        values = None
        if request.pulls:
            self.behind[request.source] = 0
            values = self.values
        if request.kind == "push_pull":
            values = self.rule.answer(self.values, source=request.source)
        deliver(Answer(self.reached_clock), values)
        return True

    def reset(self, values: Tensor) -> None:
        """Replace the values. Clocks and counters do not change."""
        with self._lock:
            self.values.copy_(values)
