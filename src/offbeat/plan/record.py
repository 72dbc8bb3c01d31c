"""The record of a run: totals after each step, from which a forecast is computed."""

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from offbeat.plan.cluster import RepresentativeCluster
from offbeat.plan.memory import reachable_bytes
from offbeat.plan.placeholder_model import PlaceholderModel, PlaceholderTraining

_SPARSER = 1.6  # factor on the number of occasions from one measurement of memory to the next


class Step(NamedTuple):
    """Totals of a run at the end of a step.

    Attributes:
        clock: Virtual seconds, mean over the workers.
        computed: Compute seconds so far, mean over the workers.
        payload: Bytes that worker 0 has handed to operations.
        busy: Seconds for which the link of worker 0 is occupied by the operations started so far.
        backlog: Seconds until the link of worker 0 is free.
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
    """Record of one run.

    Attributes:
        cluster: The cluster of the run.
        running: Number of workers that run.
        step_seconds: Compute time of a step, seconds.
        steps: Totals after each step that all running workers have completed.
        gaps: Steps in which parameters were written, with the largest number of steps since the
            previous write of a parameter.
        memory: Largest measured memory, bytes.
        details: ``Stats.details`` of worker 0 at the end.
    """

    cluster: RepresentativeCluster
    running: int
    step_seconds: float
    steps: list[Step] = field(default_factory=list)
    gaps: list[tuple[int, int]] = field(default_factory=list)
    memory: int = 0
    details: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._trainings: dict[int, PlaceholderTraining] = {}  # by rank
        self._counts = [0] * self.running  # completed steps, by rank
        self._sums: list[list[float]] = []  # by step: clock, computed, number of workers
        self._of_worker_0: list[tuple[float, float, float, int]] = []  # by step
        self._busy = self._free = 0.0
        self._occasions, self._next_occasion = 0, 0
        self._measured_payload = -1

    def __len__(self) -> int:
        return len(self.steps)

    def start(self, rank: int, training: PlaceholderTraining, model: PlaceholderModel) -> None:
        """Start the record of worker ``rank``."""
        self._trainings[rank] = training
        if rank == 0:
            self._tensors, self._own = model.tensors, model.storage_addresses()
            self._versions = [tensor._version for tensor in self._tensors]
            self._written = [0] * len(self._versions)
            training.before_waiting(self._measure_memory)

    def close(self) -> None:
        """End the record and release the workers."""
        if 0 in self._trainings:
            self.details = dict(self._trainings[0].stats.details)
        self._trainings.clear()
        self._tensors = []

    def stepped(self, rank: int) -> bool:
        """Record a completed step of worker ``rank``. Return True if all have now completed it."""
        number = self._counts[rank]
        self._counts[rank] += 1
        if number == len(self._sums):
            self._sums.append([0.0, 0.0, 0])
        sums = self._sums[number]
        clock, computed = self._times(rank)
        sums[0] += clock
        sums[1] += computed
        sums[2] += 1
        if rank == 0:
            self._observe(number + 1)
        complete = sums[2] == self.running
        if complete:
            totals = self._of_worker_0[number]
            self.steps.append(Step(sums[0] / self.running, sums[1] / self.running, *totals))
        return complete

    def _times(self, rank: int) -> tuple[float, float]:
        """Return virtual seconds and compute seconds so far."""
        cluster = self.cluster
        if cluster.clocks is not None:
            return float(cluster.clocks.mean()), cluster.computed
        return cluster.workers.kernel.now, self._trainings[rank].stats.compute_seconds

    def _observe(self, step: int) -> None:
        """Record the totals of worker 0 and its written parameters."""
        self._measure_memory(None)
        for span in self.cluster.spans:
            if span.rank == 0 and span.kind == "transfer" and not span.inside:
                self._busy += span.end - span.start
                self._free = max(self._free, span.end)
        self.cluster.spans.clear()
        now, stats = self.cluster.workers.kernel.now, self._trainings[0].stats
        backlog = max(0.0, self._free - now)
        self._of_worker_0.append((stats.payload_bytes, self._busy, backlog, stats.syncs))
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

    def _measure_memory(self, _: object) -> None:
        """Measure the memory of worker 0, ever more rarely, if it has sent anything since."""
        training = self._trainings[0]
        payload = training.payload_bytes
        if payload == self._measured_payload:
            return
        self._measured_payload = payload
        self._occasions += 1
        if self._occasions >= self._next_occasion:
            self._next_occasion = math.ceil(self._occasions * _SPARSER)
            scale = self.cluster.scale
            used = reachable_bytes(training.roots, self._own, scale, hidden=self)
            self.memory = max(self.memory, used)

    def agrees(self, other: "Record", tolerance: float) -> bool:
        """Return True if all steps of both records took as long and sent as much."""
        if len(self) != len(other):
            return False
        return all(
            abs(one.clock - two.clock) <= tolerance * max(1.0, one.clock)
            and one.payload == two.payload
            for one, two in zip(self.steps, other.steps, strict=True)
        )
