"""The record of a simulated run: totals after each step, from which a forecast is computed.

Some workers may be represented by others instead of running (see ``plan/cluster.py``). Worker 0
always runs. All times are virtual seconds, from the simulator's clock.
"""

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from offbeat.plan.cluster import RepresentativeCluster
from offbeat.plan.memory import reachable_bytes
from offbeat.plan.placeholder_model import PlaceholderModel, PlaceholderTraining

_SPARSER = 1.6  # memory is measured when the number of payload changes has grown by this factor


class Step(NamedTuple):
    """Totals of a run at the end of a step.

    Attributes:
        clock: Time at which the step ended, mean over the workers.
        computed: Compute seconds so far, mean over the workers.
        payload: Bytes that worker 0 has passed to operations so far.
        busy: Seconds for which all operations so far occupy the link of worker 0 to the switch.
        backlog: Seconds from the end of the step until this link is free.
        syncs: Number of steps so far in which worker 0 synchronized.
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
        gaps: Pairs (step, gap), one for each step in which parameters of worker 0 were replaced by
            their mean. ``gap`` is the number of steps since their previous mean. If it differs
            between these parameters, the largest counts. First means do not count.
        memory: Largest measured memory of worker 0, without model and gradients, bytes.
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
        # For each step, sums over the workers so far: clock, compute seconds, number of workers.
        self._sums: list[list[float]] = []
        # Totals of worker 0 after each step: payload bytes, busy seconds, backlog, syncs.
        self._totals: list[tuple[float, float, float, int]] = []
        self._busy = self._free = 0.0
        # Number of changes of worker 0's payload: so far, and at the next measurement of memory.
        self._changes, self._next_change = 0, 0
        self._measured_payload = -1

    def __len__(self) -> int:
        return len(self.steps)

    def start(self, rank: int, training: PlaceholderTraining, model: PlaceholderModel) -> None:
        """Start the record of worker ``rank``."""
        self._trainings[rank] = training
        if rank == 0:
            self._tensors, self._excluded = model.tensors, model.storage_addresses()
            self._versions = [tensor._version for tensor in self._tensors]
            self._last_means = [0] * len(self._versions)  # step of each parameter's last mean
            training.before_waiting(self._measure_memory)

    def close(self) -> None:
        """End the record, and release the objects of the workers."""
        if 0 in self._trainings:
            self.details = dict(self._trainings[0].stats.details)
        self._trainings.clear()
        self._tensors = []

    def stepped(self, rank: int) -> bool:
        """Record that ``rank`` has completed a step. Return True if all running workers have."""
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
            totals = self._totals[number]
            self.steps.append(Step(sums[0] / self.running, sums[1] / self.running, *totals))
        return complete

    def _times(self, rank: int) -> tuple[float, float]:
        """Return time and compute seconds of ``rank``, or means if the cluster has clocks."""
        cluster = self.cluster
        if cluster.clocks is not None:
            return float(cluster.clocks.mean()), cluster.computed
        return cluster.workers.kernel.now, self._trainings[rank].stats.compute_seconds

    def _observe(self, step: int) -> None:
        """Record the totals of worker 0, and which of its parameters were averaged in ``step``.

        The placeholder's optimizer writes nothing, so only a mean increments a version counter.
        """
        self._measure_memory(None)
        for span in self.cluster.spans:
            if span.rank == 0 and span.kind == "transfer" and not span.inside:
                self._busy += span.end - span.start
                self._free = max(self._free, span.end)
        self.cluster.spans.clear()
        now, stats = self.cluster.workers.kernel.now, self._trainings[0].stats
        backlog = max(0.0, self._free - now)
        self._totals.append((stats.payload_bytes, self._busy, backlog, stats.syncs))
        versions = [tensor._version for tensor in self._tensors]
        if versions != self._versions:
            gaps = [0]
            for i, (new, old) in enumerate(zip(versions, self._versions, strict=True)):
                if new != old:
                    gaps += [step - self._last_means[i]] if self._last_means[i] else []
                    self._last_means[i] = step
            if any(gaps):
                self.gaps.append((step, max(gaps)))
            self._versions = versions

    def _measure_memory(self, _: object) -> None:
        """Measure the memory of worker 0, but only after some of the changes of its payload.

        Measuring is slow. It therefore happens after the changes 1, 2, 4, 7, 12, 20, …
        """
        training = self._trainings[0]
        payload = training.payload_bytes
        if payload == self._measured_payload:
            return
        self._measured_payload = payload
        self._changes += 1
        if self._changes >= self._next_change:
            self._next_change = math.ceil(self._changes * _SPARSER)
            scale = self.cluster.scale
            used = reachable_bytes(training.roots, self._excluded, scale, hidden=self)
            self.memory = max(self.memory, used)
