"""One shard of a parameter server: a part of the server's vector, and the requests to it.

Workers *push* values to the shard and *pull* its values. A ``Rule`` defines how a push changes the
shard. Each worker has a *clock*, such as its number of local steps. The shard can delay an answer
until the minimum clock of the workers has risen to some value. Workers that wait at a *barrier*
(until all workers have reached it) do not count in the minimum.

This module does not communicate. ``parameter_server.py`` passes it the requests and the functions
that send its answers.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from offbeat import OffbeatError

NO_CLOCK = 2**62
"""Clock of a worker for which no other worker waits. Larger than all real clocks."""

RequestKind = Literal["push", "pull", "push_pull", "release", "barrier", "wait", "leave"]
_KINDS: tuple[RequestKind, ...] = get_args(RequestKind)


@dataclass(frozen=True)
class Request:
    """A worker's request to one shard.

    Attributes:
        kind: Kind of the request:

            - "push": apply values. "pull": return values. "push_pull": both.
            - "release": answer this worker's requests that wait for a clock now.
            - "barrier": the worker has reached a barrier. "wait": it still waits there.
            - "leave": the worker makes no more requests.
        source: Rank of the worker.
        clock: New clock of this worker. −1 leaves it unchanged.
        min_clock: The shard answers "pull" and "push_pull" when the minimum clock of the workers is
            at least this.
    """

    kind: RequestKind
    source: int
    clock: int = -1
    min_clock: int = -NO_CLOCK

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
        """Return the request as three int64 numbers, without ``source``."""
        return torch.tensor([_KINDS.index(self.kind), self.clock, self.min_clock], device="cpu")

    @classmethod
    def decode(cls, header: Tensor, source: int) -> "Request":
        """Return the request that rank ``source`` has encoded as ``header``."""
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
        clock: Minimum clock of the workers that are not at a barrier (``NO_CLOCK`` if there are
            none). In an answer with ``reached``: minimum clock of all workers.
        reached: True in the answer to "barrier" or "wait" if all workers have reached the barrier.
    """

    clock: int
    reached: bool = False


class Rule:
    """The update rule of a shard, which applies pushed values. This base class adds them.

    A rule must work element by element, because a shard holds only a part of the vector. Only one
    thread at a time calls the rule, often a background thread.
    """

    def push(self, shard: Tensor, values: Tensor, *, source: int) -> None:
        """Change ``shard`` in place, given the ``values`` that rank ``source`` has pushed."""
        shard.add_(values)

    def answer(self, shard: Tensor, *, source: int) -> Tensor:
        """Return the values that answer a "push_pull" of rank ``source``."""
        return shard


Deliver = Callable[[Answer, Tensor | None], None]
"""Function that sends an answer to the worker. Its second argument is the pulled values or None."""


class Shard:
    """One part of the server's vector, the clocks, and the requests that wait for an answer.

    Args:
        values: Initial values of this part of the vector, 1-D.
        rule: The update rule.
        workers: Number of workers.

    Attributes:
        values: Values of this part of the vector.
        clocks: Clock of each worker.
        pushes: Number of pushes so far.
        staleness: Histogram of the staleness of pushes, as {staleness: number of pushes}. The
            staleness of a push is the number of pushes by other workers since the last pull of its
            worker.
    """

    def __init__(self, values: Tensor, rule: Rule, workers: int) -> None:
        self.values, self.clocks, self.pushes = values, [0] * workers, 0
        self.staleness: dict[int, int] = {}
        self._rule = rule
        self._behind = [0] * workers  # pushes by other workers since the last pull
        self._at_barrier = [False] * workers
        self._clock = 0  # minimum clock of the workers that are not at a barrier
        self._barrier_clock = 0  # minimum clock at the last completed barrier
        self._received = 0  # number of requests so far, without those of kind "wait"
        # Unanswered requests: (request, ``_received`` at its arrival, function for the answer).
        self._waiting: list[tuple[Request, int, Deliver]] = []
        self._lock = threading.Lock()

    def handle(self, request: Request, values: Tensor | None, deliver: Deliver) -> None:
        """Handle one request, then answer all requests whose condition holds, the oldest first.

        ``values`` are the pushed values, if any. They are not used after the call. ``deliver`` is
        called with the answer, now or in a later call of ``handle``.
        """
        with self._lock:
            source = request.source
            if values is not None:
                self._push(values, source)
            if request.clock >= 0:
                self.clocks[source] = request.clock
            if request.kind == "barrier":
                self._arrive(source)
            self._received += request.kind != "wait"
            if request.answered:
                self._waiting.append((request, self._received, deliver))
            self._clock = self._min_clock()
            # A worker at a barrier must not wait for a clock, because it might never be reached.
            released = source if request.kind in ("release", "barrier") else None
            self._waiting = [each for each in self._waiting if not self._answer(*each, released)]

    def _min_clock(self) -> int:
        clocks = zip(self.clocks, self._at_barrier, strict=True)
        return min((clock for clock, waits in clocks if not waits), default=NO_CLOCK)

    def _push(self, values: Tensor, source: int) -> None:
        behind = self._behind[source]
        self.staleness[behind] = self.staleness.get(behind, 0) + 1
        self._behind = [n + (rank != source) for rank, n in enumerate(self._behind)]
        self._rule.push(self.values, values, source=source)
        self.pushes += 1

    def _arrive(self, source: int) -> None:
        """Record that a worker has reached the barrier, and end the barrier with the last one."""
        self._at_barrier[source] = True
        if all(self._at_barrier):
            self._at_barrier = [False] * len(self.clocks)
            self._barrier_clock = self._min_clock()

    def _answer(
        self, request: Request, received: int, deliver: Deliver, released: int | None
    ) -> bool:
        """Answer a waiting request if its condition holds. Return True if it was answered.

        ``released`` is the rank of a worker whose requests do not wait for clocks.
        """
        if request.kind in ("barrier", "wait"):
            if not self._at_barrier[request.source]:
                # Answer the clock at the barrier: workers may have taken steps since then.
                deliver(Answer(self._barrier_clock, reached=True), None)
                return True
            # Another worker has made a request, so it is alive. Answer, to restart the time-out of
            # the waiting worker. That worker then sends "wait".
            if self._received > received:
                deliver(Answer(self._clock), None)
                return True
            return False
        if self._clock < request.min_clock and request.source != released:
            return False
        self._behind[request.source] = 0
        exchanged = request.kind == "push_pull"
        values = self._rule.answer(self.values, source=request.source) if exchanged else self.values
        deliver(Answer(self._clock), values)
        return True

    def copy(self) -> Tensor:
        """Return a copy of the values."""
        with self._lock:
            return self.values.clone()
