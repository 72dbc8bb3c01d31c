"""What happened in each step of a run: the series from which the figures of a row are computed."""

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from offbeat.plan.memory import reachable_bytes
from offbeat.plan.mirror import MirrorCluster
from offbeat.plan.phantom import Phantom
from offbeat.plan.trainee import Trainee

_SPARSER = 1.6  # from one look at the memory to the next: factor of the occasions passed


class Step(NamedTuple):
    """Totals at the end of a step, and what was so then.

    Attributes:
        clock: Virtual seconds, the mean over the workers.
        computed: Seconds that a worker has computed so far, likewise.
        payload: Bytes that worker 0 has handed to operations.
        busy: Seconds that its link was busy, those to come of what has started included.
        backlog: Seconds until its link is free.
        syncs: Steps that synchronized.
    """

    clock: float
    computed: float
    payload: float
    busy: float
    backlog: float
    syncs: int


@dataclass
class Record:
    """The steps of one run.

    Attributes:
        cluster: The cluster of the run.
        running: How many workers run.
        step_seconds: A step computed alone.
        steps: The steps that all of them have completed.
        gaps: Steps at which parameters were written, with the most own steps since the last time.
        memory: The most bytes that were seen in use.
        details: ``Stats.details`` of worker 0 at the end.
    """

    cluster: MirrorCluster
    running: int
    step_seconds: float
    steps: list[Step] = field(default_factory=list)
    gaps: list[tuple[int, int]] = field(default_factory=list)
    memory: int = 0
    details: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._trainees: dict[int, Trainee] = {}
        self._counts = [0] * self.running
        self._sums: list[list[float]] = []  # by step: clock and computed, of those that have come
        self._seen: list[tuple[float, float, float, int]] = []  # by step, of worker 0
        self._busy = self._free = 0.0
        self._occasions, self._next = 0, 0
        self._payload = -1

    def __len__(self) -> int:
        return len(self.steps)

    def begin(self, rank: int, trainee: Trainee, model: Phantom) -> None:
        """Worker ``rank`` begins."""
        self._trainees[rank] = trainee
        if rank == 0:
            self._tensors, self._own = model.tensors, model.own_bytes()
            self._versions = [tensor._version for tensor in self._tensors]
            self._written = [0] * len(self._versions)
            trainee.before_waiting(self._look)

    def close(self) -> None:
        """The run has ended: keep no worker."""
        if 0 in self._trainees:
            self.details = dict(self._trainees[0].stats.details)
        self._trainees.clear()
        self._tensors = []

    def stepped(self, rank: int) -> bool:
        """Worker ``rank`` has ended a step. Returns whether all have ended one more."""
        number = self._counts[rank]
        self._counts[rank] += 1
        if number == len(self._sums):
            self._sums.append([0.0, 0.0, 0])
        sums = self._sums[number]
        clock, computed = self._totals(rank)
        sums[0] += clock
        sums[1] += computed
        sums[2] += 1
        if rank == 0:
            self._note(number + 1)
        complete = sums[2] == self.running
        if complete:
            seen = self._seen[number]
            self.steps.append(Step(sums[0] / self.running, sums[1] / self.running, *seen))
        return complete

    def _totals(self, rank: int) -> tuple[float, float]:
        cluster = self.cluster
        if cluster.clocks is not None:
            return float(cluster.clocks.mean()), cluster.computed
        return cluster.workers.kernel.now, self._trainees[rank].stats.compute_seconds

    def _note(self, step: int) -> None:
        """What can be seen of worker 0 after a step."""
        self._look(None)
        for span in self.cluster.spans:
            if span.rank == 0 and span.kind == "transfer" and not span.inside:
                self._busy += span.end - span.start
                self._free = max(self._free, span.end)
        self.cluster.spans.clear()
        now, stats = self.cluster.workers.kernel.now, self._trainees[0].stats
        backlog = max(0.0, self._free - now)
        self._seen.append((stats.payload_bytes, self._busy, backlog, stats.syncs))
        versions = [tensor._version for tensor in self._tensors]
        if versions != self._versions:
            gaps = [0]
            for i, (new, old) in enumerate(zip(versions, self._versions, strict=True)):
                if new != old:
                    gaps += [step - self._written[i]] if self._written[i] else []
                    self._written[i] = step
            if any(gaps):
                self.gaps.append((step, max(gaps)))
            self._versions = versions

    def _look(self, _: object) -> None:
        """Look at the memory of worker 0, now and then, where something was sent since."""
        trainee = self._trainees[0]
        payload = trainee.payload_bytes
        if payload == self._payload:
            return
        self._payload = payload
        self._occasions += 1
        if self._occasions >= self._next:
            self._next = math.ceil(self._occasions * _SPARSER)
            scale = self.cluster.scale
            used = reachable_bytes(trainee.roots, self._own, scale, hidden=self)
            self.memory = max(self.memory, used)

    def agrees(self, other: "Record", close: float) -> bool:
        """Whether all steps of both took as long and sent as much."""
        if len(self) != len(other):
            return False
        return all(
            abs(one.clock - two.clock) <= close * max(1.0, one.clock) and one.payload == two.payload
            for one, two in zip(self.steps, other.steps, strict=True)
        )
