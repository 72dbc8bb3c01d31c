"""A simulated cluster on which few workers run and represent all others.

Workers that start the same operations in the same order need not all be run. The running workers
are the *representatives*. A collective starts once all representatives have joined it, and its
duration is that of a collective of all workers.

* **One representative.** Without jitter the clocks of all workers agree. With jitter every other
  worker is simulated by its clock alone: the clock advances by the worker's own compute time, and
  every clock waits for the end of a collective. The durations are those of a full run, provided
  that no decision of a worker depends on the time. A decision depends on the time if a worker polls
  an operation (``Handle.done``): if the operation has ended on some clocks but not on others,
  ``DivergedError`` is raised, and the caller runs all workers.
* **One representative per node, or every worker.** Each representative has its own time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from offbeat.simulate.cluster import (
    Contribution,
    EndSignal,
    PendingCollective,
    SimulatedCluster,
    Span,
)
from offbeat.simulate.compute import Compute
from offbeat.simulate.connections import Group
from offbeat.simulate.kernel import Kernel, Signal
from offbeat.simulate.network import CollectiveKind, Network
from offbeat.simulate.workers import DeadlockError, SimulatedWorker, Workers

_JITTER = 0x6D6972726F72  # the purpose in (seed, purpose)


class DivergedError(Exception):
    """Raised if workers would take different decisions, so that one cannot represent all."""


class StepTime:
    """Distribution of the duration of a step of one worker, or of one node.

        duration = max over the workers of the node (seconds · jitter factor) + tail

    Args:
        seconds: Compute time of a step of one worker, seconds.
        jitter: Standard deviation of the compute time relative to ``seconds``; log-normal.
        workers: Workers per node; 1 without nodes.
        tail: Seconds from the end of computing until the gradients are averaged inside the node.
    """

    def __init__(self, seconds: float, jitter: float, workers: int = 1, tail: float = 0.0) -> None:
        self.seconds, self.jitter, self.workers, self.tail = seconds, jitter, workers, tail
        variance = np.log1p(jitter**2)
        self._normal = -variance / 2, np.sqrt(variance)

    def draw(self, random: np.random.Generator, count: int) -> NDArray[np.float64]:
        """Draw the compute seconds, without the tail, of one step of ``count`` workers or nodes."""
        if not self.jitter:
            return np.full(count, self.seconds)
        factors = random.lognormal(*self._normal, size=(count, self.workers))
        drawn: NDArray[np.float64] = self.seconds * factors.max(axis=1)
        return drawn


class _Cost(NamedTuple):
    """Seconds of a collective: ``fixed + per_byte · bytes``."""

    fixed: float
    per_byte: float


@dataclass(eq=False)
class _Drawn:
    """Compute seconds of all workers or nodes in one step.

    Attributes:
        seconds: The seconds, by worker or node.
        taken: Number of representatives that have started the step.
    """

    seconds: NDArray[np.float64]
    taken: int = 0


class RepresentativeCluster(SimulatedCluster):
    """A simulated cluster whose representatives run; see the module.

    Args:
        workers: The representatives.
        members: Their global ranks.
        size: Number of workers, including those that are represented.
        network: The links.
        step_time: Duration of a step.
        scale: ``Host.scale``.
        seed: Seed of the jitter.

    Attributes:
        clocks: Virtual seconds of every worker, or every node; None unless one worker represents
            several and steps vary.
        computed: Mean compute seconds of the workers so far; 0 without clocks.
    """

    def __init__(
        self,
        workers: Workers,
        members: Sequence[int],
        size: int,
        network: Network,
        step_time: StepTime,
        scale: float,
        seed: int = 0,
    ) -> None:
        super().__init__(workers, network, Compute(step_time.seconds), seed, scale=scale)
        self._members, self._step_time = frozenset(members), step_time
        self._random = np.random.default_rng([seed, _JITTER])
        self._drawn: dict[int, _Drawn] = {}  # by step
        self._current: dict[int, NDArray[np.float64]] = {}  # seconds of the current step, by rank
        self._units = size // step_time.workers  # workers, or nodes
        self.clocks: NDArray[np.float64] | None = None
        self.computed = 0.0
        if step_time.jitter and len(self._members) == 1 < self._units:
            self.clocks = np.zeros(self._units)
        self._costs: dict[tuple[CollectiveKind, Group], _Cost] = {}
        self._representatives: dict[Group, list[int]] = {}
        self._free: dict[tuple[bool, int], float] = {}  # network cards by (inside, rank)

    # -- computing and waiting -------------------------------------------------------------------

    @override
    def compute_step(self, rank: int, progress: float) -> None:
        before, ends = self._progress[rank], progress >= 1
        self._progress[rank] = 0.0 if ends else progress
        part, tail = progress - before, self._step_time.tail if ends else 0.0
        own = self._step_time.seconds
        if self._step_time.jitter:
            if before == 0:
                self._current[rank] = self._draw(rank)
            drawn = self._current[rank]
            own = float(drawn[rank // self._step_time.workers])
            if self.clocks is not None:
                self.clocks += drawn * part + tail
                self.computed += float(drawn.mean()) * part + tail
        self.workers.sleep(own * part + tail, "computing a step")

    def _draw(self, rank: int) -> NDArray[np.float64]:
        """Return the compute seconds of all units in the next step of ``rank``.

        All representatives see the same seconds for the same step.
        """
        step = self._steps[rank]
        self._steps[rank] += 1
        if step not in self._drawn:
            self._drawn[step] = _Drawn(self._step_time.draw(self._random, self._units))
        drawn = self._drawn[step]
        drawn.taken += 1
        if drawn.taken == len(self._members):
            del self._drawn[step]
        return drawn.seconds

    @override
    def wait(self, rank: int, signal: Signal, what: str) -> None:
        self.workers.wait(signal, what)
        if self.clocks is not None and isinstance(signal, EndSignal):
            np.maximum(self.clocks, signal.seconds, out=self.clocks)

    @override
    def idle(self, rank: int, seconds: float, what: str) -> None:
        self.workers.sleep(seconds, f"polling {what}")
        if self.clocks is not None:
            self.clocks += seconds

    def require_agreement(self, end: EndSignal) -> None:
        """Raise DivergedError if ``end`` has passed on some clocks but not on all."""
        if self.clocks is not None and end.seconds != np.inf:
            passed = int(np.count_nonzero(self.clocks >= end.seconds))
            if 0 < passed < len(self.clocks):
                raise DivergedError

    # -- collectives -----------------------------------------------------------------------------

    @override
    def participants(self, group: Group) -> Sequence[int]:
        if group not in self._representatives:
            ranks = [member for member in group.members if member in self._members]
            self._representatives[group] = ranks
        return self._representatives[group]

    @override
    def _transfer(
        self, operation: PendingCollective, group: Group, contribution: Contribution
    ) -> None:
        kernel, ranks, what = self.workers.kernel, self.participants(group), contribution.what
        inside = not self.network.crosses(group.members)
        joined = kernel.now
        if self.clocks is not None and not self.workers.current.background:
            joined = float(self.clocks.max())
        start = max(joined, *(self._free.get((inside, rank), 0.0) for rank in ranks))
        cost = self._cost(contribution.kind, group)
        end = start + cost.fixed + cost.per_byte * contribution.size_bytes
        operation.signal.seconds = end
        for rank in ranks:
            self._free[inside, rank] = end
        self.spans.append(Span(ranks[0], "transfer", start, end, what, inside=inside))

        def finish() -> None:
            operation.finish(ranks, ranks)
            operation.signal.fire()

        kernel.at(end, finish, what)

    def _cost(self, kind: CollectiveKind, group: Group) -> _Cost:
        if (kind, group) not in self._costs:
            sharing = 1 if kind == "broadcast" else group.sharing
            empty, large = (
                self.network.collective_seconds(kind, size, group.members, sharing)
                for size in (0, 1e9)
            )
            self._costs[kind, group] = _Cost(empty, (large - empty) / 1e9)
        return self._costs[kind, group]


# -- the running workers -------------------------------------------------------------------------


class _Workers(Workers):
    """Simulated workers that share one random state, because a plan draws no random numbers."""

    @override
    def _load_random(self, worker: SimulatedWorker) -> None:
        self._loaded = worker


class _SingleWorker(_Workers):
    """One simulated worker, which runs on the calling thread."""

    @override
    def run(self, function: Callable[[SimulatedWorker], Any]) -> None:
        self._current = worker = self.all[0]
        try:
            worker.result = function(worker)
        finally:
            self._stop()

    @override
    def wait(self, signal: Signal, what: str) -> None:
        worker = self.current
        if worker.background:  # runs on a thread of its own
            super().wait(signal, what)
            return
        while not signal.happened:
            if not self.kernel.step():
                raise DeadlockError(f"the only running worker waits for {what}, which never ends")
            self._current = worker
            for background in self._background:
                if background.error is not None:
                    raise background.error


def workers_for(members: Sequence[int]) -> Workers:
    """Return simulated workers that run as the representatives ``members``."""
    kind = _SingleWorker if len(members) == 1 else _Workers
    return kind(Kernel(), len(members), seed=0)
