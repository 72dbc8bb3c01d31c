"""Asynchronous SGD without gradient delay: workers compute while their models are merged."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from offbeat.fabric import Handle
from offbeat.replica import Bucket, add_clamped, add_to, make_buckets
from offbeat.strategies.base import (
    Roll,
    Strategy,
    Worker,
    require_integer,
    require_number,
    transient,
)


@dataclass
class Merge:
    """The mean under way: of models as they were at the snapshot."""

    sums: list[Tensor]  # one a bucket: Σ w·s over the workers, once arrived
    own: list[Tensor]  # one a bucket: s, this worker's snapshot
    base: list[Tensor]  # P, the last merged model, one a parameter bucket; where it is needed
    velocity: list[Tensor]  # v, likewise; with outer momentum
    flying: bool = False  # launched and not yet applied
    weight: float = 0.0  # Σ w, once known
    snapshot_step: int = 0  # own step of the snapshot under way
    launched_seconds: float = 0.0
    arrived_seconds: float | None = None
    roll: Handle[Roll] | None = transient(default=None)
    handles: list[Handle[Tensor]] = transient(default_factory=list)


@dataclass
class AsyncState:
    """Where the worker stands in the schedule."""

    merge: Merge
    buckets: list[Bucket] = transient()  # parameters first, then floating-point buffers
    parameter_buckets: int = transient()  # how many of them hold parameters
    steps: int = 0  # own steps
    merged_step: int = 0  # own step of the snapshot that was last applied
    steps_in_cycle: int = 0  # own steps since the last snapshot
    merges: int = 0
    merged_steps: int = 0  # own steps those merges brought in
    merge_seconds: float = 0.0
    distance: float = 0.0  # ‖mean(s) − s‖ of the last merge that was measured
    distances: list[float] = field(default_factory=list)  # means of it over the workers
    staleness: dict[int, int] = field(default_factory=dict)  # own steps past P: how often
    called: Handle[Roll] | None = transient(default=None)  # eager: "I have a new step"
    own_weight: float = transient(default=1.0)  # what this worker put into the roll called last


@dataclass(frozen=True, kw_only=True, repr=False)
class AsyncAveraging(Strategy):
    """Workers go on computing while their models are averaged; nobody waits for the network.

    **Update**. P is the last merged model, u a worker's own update since. At a snapshot s = P + u;
    when the mean of all workers' s has arrived, some own steps later:

        M = Σ w·s / Σ w                       = P + mean(u): the paper's next P (Lemma 3.1)
        P ← M                                 plain, outer_lr=1 and outer_momentum=0
        m = M − P;  v ← μ·v + m;  P ← P + η_o·(m + μ·v)      with outer momentum (Nesterov)
        x ← x + (P − s)                       = x + mean(u) − u when plain (Algorithm 2)

    Over a lossy ``wire`` updates travel, because rounding is relative to what is sent:

        M = P + Σ w·(s − P) / Σ w             s − P with what rounding took from the last one

    ``schedule="cyclic"`` (Algorithm 2): a snapshot every β = τ/2 own steps; the mean of the one
    before is applied first, and waited for if it has not arrived. ``schedule="eager"``
    (Algorithm 1): a merge starts as soon as the last one has been applied and every worker has a
    new step (they tell each other by a small sum that nobody waits for), and is applied at the
    first step boundary after it arrived. In both, a worker whose own steps past P reach τ waits.

    Args:
        staleness: τ, the most own steps past the last merged model (cyclic: even, ≥ 2; eager ≥ 1).
        schedule: "cyclic" or "eager".
        outer_lr: η_o > 0.
        outer_momentum: μ in [0, 1).
        discrepancy_every: Measure ‖M − s‖ at every that many merges; the mean over the workers is
            in the records (``discrepancy``) and in ``Stats.details``. None: never.

    *Communication*: one mean of the model a merge, and five numbers; overlapped with τ/2 steps.
    *Memory*: two flat copies (the snapshot, the sum in flight), and a third inside ``consensus``;
    two more with outer momentum; with a lossy wire P (once) and the errors. *State*: all of these,
    counters; kept in checkpoints. The optimizer's state stays as it is.

    *Differs from the paper*: models are sent instead of updates (but over a lossy wire), which is
    the same in exact arithmetic, needs no copy of x_init, and re-anchors the workers on one shared
    mean, so that rounding does not drive them apart. Line 22 of Algorithm 1 would discard progress;
    it is kept. Outer momentum and the masterless eager schedule are ours. Floating-point buffers
    are shifted likewise but stay between their own value and the mean, so that a variance stays
    positive.

    Source: "Asynchronous SGD without gradient delay for efficient distributed training", ICLR 2019
    submission, Algorithms 1 and 2.
    """

    name: ClassVar[str] = "async"
    staleness: int = 16
    schedule: Literal["cyclic", "eager"] = "cyclic"
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    discrepancy_every: int | None = None

    def __post_init__(self) -> None:
        if self.schedule not in ("cyclic", "eager"):
            raise ValueError(f'schedule must be "cyclic" or "eager", got {self.schedule!r}')
        require_integer("staleness", self.staleness, least=2 if self.schedule == "cyclic" else 1)
        if self.schedule == "cyclic" and self.staleness % 2:
            raise ValueError(
                "staleness must be even with the cyclic schedule, whose cycles are staleness/2 "
                f"steps long; got {self.staleness}"
            )
        require_number("outer_lr", self.outer_lr)
        if not self.outer_lr > 0:
            raise ValueError(f"outer_lr must be positive, got {self.outer_lr}")
        require_number("outer_momentum", self.outer_momentum)
        if not 0 <= self.outer_momentum < 1:
            raise ValueError(f"outer_momentum must be in [0, 1), got {self.outer_momentum}")
        if self.discrepancy_every is not None:
            require_integer("discrepancy_every", self.discrepancy_every, least=1)

    @property
    def _outer(self) -> bool:
        return (self.outer_lr, self.outer_momentum) != (1.0, 0.0)

    def start(self, worker: Worker) -> AsyncState:
        """Every worker holds P_0."""
        parameters = make_buckets(p for _, p in worker.replica.parameters)
        buckets = [*parameters, *make_buckets(worker.replica.float_buffers())]
        merge = Merge(
            sums=[b.flat for b in buckets],
            own=[torch.empty_like(b.flat) for b in buckets],
            base=[b.pack().clone() for b in parameters if self._outer or not worker.wire.exact],
            velocity=[torch.zeros_like(b.flat) for b in parameters if self._outer],
        )
        return AsyncState(merge, buckets, len(parameters))

    def before_step(self, worker: Worker) -> None:
        """Nothing: gradients are used where they arise."""

    def after_step(self, worker: Worker) -> bool:
        """Apply a merge that has arrived, start the next one, wait only at the bound."""
        state: AsyncState = worker.state
        state.steps += 1
        state.steps_in_cycle += 1
        merges = state.merges
        past = state.steps - state.merged_step
        state.staleness[past] = state.staleness.get(past, 0) + 1
        worker.record["staleness"] = past
        self._note_arrival(worker)
        if self.schedule == "eager":
            self._eager(worker)
        elif 2 * state.steps_in_cycle >= self.staleness:
            self._land(worker)
            self._launch(worker, self._call(worker, stepping=True))
        self._report(worker, merged=state.merges > merges)
        return state.merges > merges

    def _eager(self, worker: Worker) -> None:
        state: AsyncState = worker.state
        while True:
            bound = state.steps - state.merged_step >= self.staleness
            if state.merge.flying and (bound or state.merge.arrived_seconds is not None):
                self._land(worker)
            elif not state.merge.flying and state.called is None and state.steps_in_cycle:
                state.called = self._call(worker, stepping=True)
            elif state.called is not None and (bound or state.called.done()):
                called, state.called = state.called, None
                called.wait()
                self._launch(worker, called)
            else:
                return

    def _call(self, worker: Worker, *, stepping: bool, finishing: bool = False) -> Handle[Roll]:
        """Start a roll. A finished worker weighs nothing once all its steps are merged."""
        state: AsyncState = worker.state
        state.own_weight = 1.0 if worker.has_news or not finishing else 0.0
        return worker.call_roll(
            stepping=stepping,
            finishing=finishing,
            measure=state.distance,
            weight=state.own_weight,
        )

    def _launch(self, worker: Worker, roll: Handle[Roll]) -> None:
        """Take a snapshot and start its mean."""
        state: AsyncState = worker.state
        merge = state.merge
        what = f"merge {state.merges + 1} of the models"
        merge.handles = []
        contribute = state.own_weight != 0
        for i, (bucket, own) in enumerate(zip(state.buckets, merge.own, strict=True)):
            own.copy_(bucket.pack())
            if not contribute:
                bucket.flat.zero_()
            if i >= state.parameter_buckets:  # a rounded variance could become negative
                merge.handles.append(worker.fabric.sum(bucket.flat, what=what))
                continue
            if contribute and not worker.wire.exact:
                bucket.flat.sub_(merge.base[i])
            merge.handles.append(
                worker.wire.sum(bucket.flat, stream=f"merge {i}", what=what, contribute=contribute)
            )
        merge.roll, merge.flying = roll, True
        merge.snapshot_step = state.steps
        merge.launched_seconds, merge.arrived_seconds = worker.fabric.now(), None
        state.steps_in_cycle = 0
        worker.has_news = False

    def _note_arrival(self, worker: Worker) -> None:
        """Poll the merge in flight: one question to the last of its operations."""
        merge: Merge = worker.state.merge
        worker.wire.advance()
        if merge.flying and merge.arrived_seconds is None:
            handles = merge.handles
            if not handles or (handles[-1].done() and all(h.done() for h in handles)):
                merge.arrived_seconds = worker.fabric.now()

    def settle(self, worker: Worker) -> None:
        """Let the merge in flight arrive, without applying it.

        A collective with the eager schedule, where workers may be in different merges: they meet
        first.
        """
        while self.schedule == "eager":
            roll = self.answer(worker, finishing=False)
            if roll.stepping == 0:
                break
        if worker.state.merge.flying:
            self._await(worker)

    def _await(self, worker: Worker) -> None:
        """Wait for the merge in flight."""
        merge: Merge = worker.state.merge
        if merge.roll is not None:
            roll, merge.roll = merge.roll.wait(), None
            merge.weight = roll.weight
            if self.discrepancy_every is not None and roll.measure and roll.stepping:
                worker.state.distances.append(roll.measure / worker.size)
        for handle in merge.handles:
            handle.wait()
        if merge.handles and not worker.wire.exact:  # updates came; a sum of models is expected
            for base, total in zip(merge.base, merge.sums, strict=False):
                total.add_(base, alpha=merge.weight)
        merge.handles = []
        if merge.arrived_seconds is None:
            merge.arrived_seconds = worker.fabric.now()

    def _land(self, worker: Worker) -> None:
        """Apply the merge in flight: x ← x + (P − s). Waits if it has not arrived."""
        state: AsyncState = worker.state
        merge = state.merge
        if not merge.flying:
            return
        self._await(worker)
        merge.flying = False
        state.merges += 1
        state.merged_steps += merge.snapshot_step - state.merged_step
        state.merged_step = merge.snapshot_step
        state.merge_seconds += (merge.arrived_seconds or 0.0) - merge.launched_seconds
        state.distance = 0.0
        if merge.weight == 0:
            return
        if self.discrepancy_every is not None and state.merges % self.discrepancy_every == 0:
            state.distance = self._distance(state)
        self._shift(worker, keep=False)

    def _shift(self, worker: Worker, *, keep: bool) -> None:
        """x ← x + (P − s). With ``keep``, P, v and the sum stay as they are."""
        state: AsyncState = worker.state
        merge = state.merge
        for i, (bucket, own) in enumerate(zip(state.buckets, merge.own, strict=True)):
            if i >= state.parameter_buckets:
                add_clamped(bucket, own, merge.weight)
            elif self._outer:
                base, velocity = merge.base[i], merge.velocity[i]
                mean = bucket.flat / merge.weight - base
                new_velocity = self.outer_momentum * velocity + mean
                step = self.outer_lr * (mean + self.outer_momentum * new_velocity)
                new_base = base + step
                add_to(bucket.tensors, new_base - own, 1.0)
                if not keep:
                    velocity.copy_(new_velocity)
                    base.copy_(new_base)
            else:
                if merge.base and not keep:
                    torch.div(bucket.flat, merge.weight, out=merge.base[i])
                shift = bucket.flat.clone() if keep else bucket.flat
                add_to(bucket.tensors, shift.sub_(own, alpha=merge.weight), 1 / merge.weight)

    def _distance(self, state: AsyncState) -> float:
        """‖M − s‖ over the parameters, of the merge that has just arrived."""
        merge = state.merge
        parts = [
            torch.linalg.vector_norm(bucket.flat / merge.weight - own).double()
            for bucket, own in zip(
                state.buckets[: state.parameter_buckets], merge.own, strict=False
            )
        ]
        return float(torch.linalg.vector_norm(torch.stack(parts)).item())

    def _report(self, worker: Worker, *, merged: bool) -> None:
        state: AsyncState = worker.state
        worker.details.update(
            merges=state.merges,
            steps_per_merge=state.merged_steps / state.merges if state.merges else 0.0,
            merge_seconds=state.merge_seconds / state.merges if state.merges else 0.0,
            staleness_max=max(state.staleness, default=0),
            staleness_histogram=state.staleness,
        )
        if merged and state.distances:
            worker.record["discrepancy"] = state.distances[-1]
            worker.details["discrepancies"] = state.distances

    def answer(self, worker: Worker, *, finishing: bool) -> Roll:
        """Join the merge that others start, if they do; leave one in flight as it is."""
        state: AsyncState = worker.state
        called, state.called = state.called, None
        if called is None:
            called = self._call(worker, stepping=False, finishing=finishing)
        roll = called.wait()
        if roll.stepping:
            self._land(worker)
            self._launch(worker, called)
        return roll

    def consensus(self, worker: Worker, roll: Roll) -> None:
        """The model as if the merge in flight had been applied, then the mean over the workers.

        The merge itself stays in flight: looking does not change the training.
        """
        merge: Merge = worker.state.merge
        if merge.flying:
            self._await(worker)
            if merge.weight:
                self._shift(worker, keep=True)
        worker.average(_all(worker), lean=True, what="consensus")

    def drain(self, worker: Worker, roll: Roll) -> None:
        """Apply the merge in flight, then take the mean of what all workers have."""
        merges = worker.state.merges
        self._land(worker)
        worker.average(_all(worker), lean=True, what="final mean")
        self._report(worker, merged=worker.state.merges > merges)


def _all(worker: Worker) -> Roll:
    """Every worker's model counts once: a reset keeps their mean, whoever is ahead."""
    return Roll(worker.size, 0, 0, 0, 0.0, 1.0)
