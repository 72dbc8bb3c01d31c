"""One shard of a parameter server: values, update rule, clocks and waiting requests.

There is no network here. ``parameter_server`` hands requests to the shard and sends its answers.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from offbeat.errors import OffbeatError

NO_CLOCK = 2**62
"""Clock of a worker for which no request waits."""

RequestKind = Literal["push", "pull", "push_pull", "clock", "release", "barrier", "wait", "leave"]
_KINDS: tuple[RequestKind, ...] = get_args(RequestKind)


@dataclass(frozen=True)
class Request:
    """A worker's request to one shard.

    Attributes:
        kind: "push" sends values, "pull" asks for values, "push_pull" does both. "clock" asks for
            the minimum clock. "release" answers the waiting requests of this worker at once.
            "barrier" says that the worker has reached the barrier, and "wait" that it still waits
            there. "leave" is its last request.
        source: Rank of the worker.
        clock: Clock of this worker from now on. −1 leaves it unchanged.
        min_clock: The answer waits until the minimum clock of the workers is at least this.
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
        """The request as int64 numbers, without ``source``, which the connection identifies."""
        return torch.tensor([_KINDS.index(self.kind), self.clock, self.min_clock])

    @classmethod
    def decode(cls, header: Tensor, source: int) -> "Request":
        """The request that rank ``source`` has encoded.

        Raises:
            OffbeatError: the numbers are not a request.
        """
        kind, clock, min_clock = header.tolist()
        if not 0 <= kind < len(_KINDS):
            raise OffbeatError(
                f"rank {source} sent a message that is no request to a parameter server: "
                f"{header.tolist()}. Check that all workers run the same version of offbeat"
            )
        return cls(_KINDS[kind], source, clock, min_clock)


class Answer(NamedTuple):
    """The answer to a request, without its values.

    Attributes:
        clock: Minimum clock of the workers that are not waiting at a barrier; ``NO_CLOCK`` if all
            are. Of a completed barrier: the minimum clock of all workers.
        reached: True if all workers have reached the barrier.
    """

    clock: int
    reached: bool = False


@dataclass(eq=False)
class Rule:
    """How a shard applies a push, and what it answers. This rule adds: z ← z + values.

    Rules work on each element alone, because a shard holds only a part of the vector. They are
    dataclasses: a checkpoint saves their fields. The shard calls them with its lock held.
    """

    def push(self, shard: Tensor, values: Tensor, *, source: int) -> None:
        """Apply the values that rank ``source`` has pushed to ``shard``, in place."""
        shard.add_(values)

    def clock_advanced(self, shard: Tensor) -> None:
        """The minimum clock has risen, or all workers have reached a barrier.

        Called before the shard answers the requests that were waiting for it.
        """

    def answer(self, shard: Tensor, *, source: int) -> Tensor:
        """The values that answer a "push_pull" of rank ``source``. The caller copies them."""
        return shard


Deliver = Callable[[Answer, Tensor | None], None]
"""Receives the answer to a request, and its values if the request pulls."""


@dataclass(eq=False)
class Shard:
    """One part of the vector, and the state of each worker's requests.

    Requests are handled in the order of the calls. After each request the shard answers all waiting
    requests whose condition holds, the oldest first.

    Attributes:
        values: The values, 1-D.
        rule: The update rule.
        clocks: Clock of each worker.
        pushes: Number of pushes applied.
        behind: For each worker: number of pushes by others since the worker last pulled.
        staleness: Number of pushes for each value of ``behind`` at the push.
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
        self._received = 0  # requests, without "wait"
        self._waiting: list[tuple[Request, int, Deliver]] = []  # with ``_received`` at that time
        self._lock = threading.Lock()
        self.reached_clock = self._min_clock()

    def _min_clock(self) -> int:
        clocks = zip(self.clocks, self._at_barrier, strict=True)
        return min((clock for clock, waits in clocks if not waits), default=NO_CLOCK)

    def handle(self, request: Request, values: Tensor | None, deliver: Deliver) -> None:
        """Handle one request, and answer the requests that were waiting for it.

        Args:
            request: The request.
            values: The pushed values, if it pushes. Not kept.
            deliver: Receives the answer, now or during a later call.
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
            # A worker at a barrier would otherwise wait for clocks that are perhaps never reached.
            released = source if request.kind in ("release", "barrier") else None
            self._waiting = [one for one in self._waiting if not self._answer(*one, released)]

    def _push(self, values: Tensor, source: int) -> None:
        behind = self.behind[source]
        self.staleness[behind] = self.staleness.get(behind, 0) + 1
        self.behind = [n + (rank != source) for rank, n in enumerate(self.behind)]
        self.rule.push(self.values, values, source=source)
        self.pushes += 1

    def _arrive(self, source: int) -> bool:
        """Note that a worker has reached the barrier. Returns True if it is the last one."""
        self._at_barrier[source] = True
        if not all(self._at_barrier):
            return False
        self._at_barrier = [False] * len(self.clocks)
        self._barrier_clock = self._min_clock()
        return True

    def _answer(
        self, request: Request, received: int, deliver: Deliver, released: int | None
    ) -> bool:
        """Answer a waiting request if its condition holds. Returns True if it was answered."""
        if request.kind in ("barrier", "wait"):
            if not self._at_barrier[request.source]:
                # Some workers may have gone on, but all must get the same clock.
                deliver(Answer(self._barrier_clock, reached=True), None)
                return True
            if self._received > received:  # shows that others are alive; the worker asks again
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
        """Replace the values. Clocks and counters stay as they are."""
        with self._lock:
            self.values.copy_(values)
