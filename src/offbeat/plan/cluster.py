"""A simulated cluster in which some workers run and represent all others.

Workers that start the same operations in the same order need not all run. Those that run are the
*representatives*. A collective starts when all representatives among its workers have joined it and
their links are free. It takes as long as with all of its workers. *Jitter* is the random variation
of compute times. All times are *virtual time*, the time of the simulator's clock.

* **One representative, no jitter.** All workers do the same at the same time.
* **One representative, jitter.** Every worker or node has a clock, but only one worker runs.
  Computing advances each clock by the compute time of its worker or node. A collective of the
  training thread starts at the latest clock. Waiting for it sets each earlier clock to the end of
  the collective. A collective that a background activity starts begins at the clock of the
  running worker, which is exact if the activity has waited for another collective. The durations
  are then exact, unless a decision depends on the time: a worker that polls (``Handle.done``) may
  decide by the time. If the polled operation has ended on some clocks but not on others,
  ``DivergedError`` is raised, and the caller must simulate again in the mode below.
* **One representative per node, or every worker.** All workers use the simulator's clock.
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

_JITTER = 0x6D6972726F72  # distinguishes the jitter from other uses of the same seed


class DivergedError(Exception):
    """Workers would decide differently, so one of them cannot represent all."""


class StepTime:
    """Distribution of the duration of a step of one worker, or of one node.

        duration = max over the workers of the node (seconds · jitter factor) + tail

    Args:
        seconds: Mean compute time of a step of one worker, seconds.
        jitter: Standard deviation of the jitter factor, whose distribution is log-normal with mean
            1. With 0 all steps take equally long.
        workers: Workers per node; 1 without nodes.
        tail: Seconds from the end of computing until the gradients are averaged inside the node.
    """

    def __init__(self, seconds: float, jitter: float, workers: int = 1, tail: float = 0.0) -> None:
        self.seconds, self.jitter, self.workers, self.tail = seconds, jitter, workers, tail
        variance = np.log1p(jitter**2)
        self._normal = -variance / 2, np.sqrt(variance)

    def draw(self, random: np.random.Generator, count: int) -> NDArray[np.float64]:
        """Draw the compute seconds of one step of ``count`` workers or nodes, without the tail."""
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
    """Compute times of all workers or nodes in one step.

    Attributes:
        seconds: Compute seconds, by worker or node.
        taken: Number of representatives that have started the step.
    """

    seconds: NDArray[np.float64]
    taken: int = 0


class RepresentativeCluster(SimulatedCluster):
    """A simulated cluster in which only the representatives run; see the module.

    Args:
        workers: The representatives.
        members: Global ranks of the representatives.
        size: Number of all workers, running or represented.
        network: The links.
        step_time: Duration of a step.
        scale: Number of elements of the full model that one element of a float32 tensor of the
            simulated model stands for (``Host.scale``).

    Attributes:
        clocks: Virtual time of every worker or node, in seconds. None unless there is jitter and
            one representative stands for several workers or nodes.
        computed: Seconds of all steps so far, including the tail of ``StepTime``, as the mean over
            the workers or nodes. 0 if ``clocks`` is None.
    """

    def __init__(
        self,
        workers: Workers,
        members: Sequence[int],
        size: int,
        network: Network,
        step_time: StepTime,
        scale: float,
    ) -> None:
        super().__init__(workers, network, Compute(step_time.seconds), 0, scale=scale)
        self._members, self._step_time = frozenset(members), step_time
        self._random = np.random.default_rng([0, _JITTER])
        self._drawn: dict[int, _Drawn] = {}  # by step
        self._current: dict[int, NDArray[np.float64]] = {}  # seconds of the current step, by rank
        self._units = size // step_time.workers  # number of workers, or of nodes
        self.clocks: NDArray[np.float64] | None = None
        self.computed = 0.0
        if step_time.jitter and len(self._members) == 1 < self._units:
            self.clocks = np.zeros(self._units)
        self._costs: dict[tuple[CollectiveKind, Group], _Cost] = {}
        self._representatives: dict[Group, list[int]] = {}
        # Time at which a link of a rank becomes free. Key: (True for the link inside the node or
        # False for the link to the switch, rank).
        self._free: dict[tuple[bool, int], float] = {}

    # -- computing and waiting -------------------------------------------------------------------

    @override
    def compute_step(self, rank: int, progress: float) -> None:
        before, ends = self._progress[rank], progress >= 1
        self._progress[rank] = 0.0 if ends else progress
        share, tail = progress - before, self._step_time.tail if ends else 0.0
        seconds = self._step_time.seconds
        if self._step_time.jitter:
            if before == 0:
                self._current[rank] = self._draw(rank)
            drawn = self._current[rank]
            seconds = float(drawn[rank // self._step_time.workers])
            if self.clocks is not None:
                self.clocks += drawn * share + tail
                self.computed += float(drawn.mean()) * share + tail
        self.workers.sleep(seconds * share + tail, "computing a step")

    def _draw(self, rank: int) -> NDArray[np.float64]:
        """Return the compute seconds of all workers or nodes in the next step of ``rank``.

        All representatives receive the same numbers for the same step.
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
        waits_in_background = self.workers.current.background
        self.workers.wait(signal, what)
        if self.clocks is not None and isinstance(signal, EndSignal) and not waits_in_background:
            np.maximum(self.clocks, signal.seconds, out=self.clocks)

    @override
    def idle(self, rank: int, seconds: float, what: str) -> None:
        self.workers.sleep(seconds, f"polling {what}")
        if self.clocks is not None:
            self.clocks += seconds

    def require_agreement(self, end: EndSignal) -> None:
        """Raise DivergedError if a collective has ended on some clocks but not on others."""
        if self.clocks is not None and end.seconds != np.inf:
            passed = int(np.count_nonzero(self.clocks >= end.seconds))
            if 0 < passed < len(self.clocks):
                raise DivergedError

    # -- collectives -----------------------------------------------------------------------------

    @override
    def participants(self, group: Group) -> Sequence[int]:
        """Return the representatives in ``group``."""
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
    """Simulated workers that share one random state, because they draw no random numbers."""

    @override
    def _load_random(self, worker: SimulatedWorker) -> None:
        self._loaded = worker


class _SingleWorker(_Workers):
    """One simulated worker, which runs on the calling thread instead of a thread of its own."""

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
        if worker.background:  # a background activity has a thread of its own
            super().wait(signal, what)
            return
        while not signal.happened:
            if not self.kernel.step():
                raise DeadlockError(f"the only running worker waits for {what}, which never ends")
            self._current = worker
            if self._error is not None:  # of a background activity
                raise self._error


def workers_for(members: Sequence[int]) -> Workers:
    """Return as many simulated workers as there are representatives ``members``."""
    kind = _SingleWorker if len(members) == 1 else _Workers
    return kind(Kernel(), len(members), seed=0)
