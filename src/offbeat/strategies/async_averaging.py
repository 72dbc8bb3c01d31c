"""Asynchronous SGD without gradient delay: workers compute while their models are merged."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from typing_extensions import override

from offbeat.means import InFlight, Outer
from offbeat.strategies.base import (
    Averages,
    NonFinite,
    Roll,
    Round,
    Rounds,
    Strategy,
    Vote,
    Worker,
    setting,
    transient,
)


@dataclass
class AsyncState:
    """The merge, and where the worker stands in the schedule."""

    merge: InFlight
    merged_step: int = 0  # own step of the snapshot that was last applied
    merges: int = 0
    merged_steps: int = 0  # own steps those merges brought in
    merge_seconds: float = 0.0
    distance: float = 0.0  # ‖mean(s) − s‖ of the last merge that was measured
    distances: list[float] = field(default_factory=list)  # means of it over the workers
    staleness: dict[int, int] = field(default_factory=dict)  # own steps past P: how often
    round: Round | None = transient(default=None)  # of the merge under way


@dataclass(frozen=True, kw_only=True, repr=False)
class AsyncAveraging(Strategy):
    """Workers go on computing while their models are averaged; nobody waits for the network.

    **Update**. P is the last merged model, u a worker's own update since. At a snapshot s = P + u;
    when the mean of all workers' s has arrived, some own steps later:

        P ← Σ w·s / Σ w                       = P + mean(u): the paper's next P (Lemma 3.1)
        x ← x + (P − s)                       = x + mean(u) − u (Algorithm 2)

    With outer momentum, and over a lossy ``wire``, where rounding is relative to what is sent,
    updates travel instead:

        m = Σ w·(s − P) / Σ w                 s − P with what rounding took from the last one
        v ← μ·v + m;  P ← P + η_o·(m + μ·v)   Nesterov; P ← P + m when plain

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

    *Communication*: one mean of the model a merge, and seven numbers; overlapped with τ/2 steps.
    *Memory*: two flat copies (the snapshot, the sum in flight), and a third inside ``consensus``;
    two more with outer momentum; with a lossy wire P (once) and the errors; P, too, with
    ``non_finite="leave_out"``, where it is what a worker that is left out goes on from, and with
    "raise" and the eager schedule. *State*: all of these, counters; kept in checkpoints. The
    optimizer's state stays as it is.

    *Differs from the paper*: models are sent instead of updates, where they can be, which is the
    same in exact arithmetic, needs no copy of x_init, and re-anchors the workers on one shared
    mean, so that rounding does not drive them apart. Line 22 of Algorithm 1 would discard progress;
    it is kept. Outer momentum and the masterless eager schedule are ours. Floating-point buffers
    are shifted likewise but stay between their own value and the mean, so that a variance stays
    positive.

    Source: "Asynchronous SGD without gradient delay for efficient distributed training", ICLR 2019
    submission, Algorithms 1 and 2.
    """

    name: ClassVar[str] = "async"
    averages: ClassVar[Averages] = "updates"
    adapts: ClassVar[bool] = True
    non_finite: ClassVar[tuple[NonFinite, ...]] = ("warn", "raise", "leave_out")
    rounds: ClassVar[Rounds] = "boundary"
    meets: ClassVar[bool] = False
    continues: ClassVar[bool] = True
    staleness: int = setting(16, least=1)
    schedule: Literal["cyclic", "eager"] = "cyclic"
    outer_lr: float = setting(1.0, above=0)
    outer_momentum: float = setting(0.0, least=0, below=1)
    discrepancy_every: int | None = setting(None, least=1)

    keeps_nodes = True

    @property
    @override
    def repeatable(self) -> bool:
        return self.schedule == "cyclic"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.schedule == "cyclic" and self.staleness < 2:
            raise ValueError(f"staleness must be at least 2, got {self.staleness}")
        if self.schedule == "cyclic" and self.staleness % 2:
            raise ValueError(
                "staleness must be even with the cyclic schedule, whose cycles are staleness/2 "
                f"steps long; got {self.staleness}"
            )

    @override
    def start(self, worker: Worker) -> AsyncState:
        """Every worker holds P_0."""
        return AsyncState(
            InFlight(
                worker.team,
                worker.wire,
                [p for _, p in worker.replica.parameters],
                name="merge",
                # An update of 0 can be sent then, by who has nothing finite to send.
                anchored=worker.leaves_out or (worker.guarded and self.schedule == "eager"),
                outer=Outer(self.outer_lr, self.outer_momentum),
                buffers=worker.replica.float_buffers,
                step=worker.step,
            ),
            merged_step=worker.step,
        )

    @override
    def iterated(self, worker: Worker) -> bool:
        """Eager: apply a merge that has arrived; wait for it only at the bound."""
        state: AsyncState = worker.state
        if self.schedule == "eager":
            worker.team.agree()
        past = worker.step - state.merged_step
        state.staleness[past] = state.staleness.get(past, 0) + 1
        worker.record["staleness"] = past
        arrived = state.merge.arrived()
        eager = self.schedule == "eager"
        merged = eager and (arrived or self._at_bound(worker)) and self._land(worker)
        self._report(worker, merged)
        return merged

    def _at_bound(self, worker: Worker) -> bool:
        """Whether this worker may take no further step before the next merge."""
        past: int = worker.step - worker.state.merged_step
        return past >= self.staleness

    @override
    def due(self, worker: Worker) -> bool:
        """Cyclic: at the end of a cycle. Eager: with a new step, once the last merge is applied."""
        merge: InFlight = worker.state.merge
        new_steps = worker.step - merge.launched_step
        if self.schedule == "cyclic":
            return 2 * new_steps >= self.staleness
        return new_steps > 0 and not merge.flying

    @override
    def vote(self, worker: Worker, part: int, *, stepping: bool, finishing: bool) -> Vote:
        """A finished worker weighs nothing once all its steps are merged."""
        weighs = worker.has_news or not finishing
        return Vote(weight=float(weighs), measure=worker.state.distance)

    @override
    def act(self, worker: Worker, round: Round) -> bool | None:
        """Apply the merge before and start this one; eager: as soon as all have called the roll."""
        eager = self.schedule == "eager"
        if eager and not round.done() and not self._at_bound(worker):
            return None
        if eager:
            round.wait()
        merged = self._land(worker)
        self._launch(worker, round)
        if eager and round.own.stepping and self._at_bound(worker):
            merged = self._land(worker)
        self._report(worker, merged)
        return merged

    def _launch(self, worker: Worker, round: Round) -> None:
        """Take a snapshot and start its mean."""
        state: AsyncState = worker.state
        # What has become NaN while the roll travelled stays here; the next vote tells of it.
        sends = self.schedule != "eager" or not worker.guarded or state.merge.finite()
        if worker.leaves_out and not sends:
            self.restore(worker)
            worker.untold = True
        state.merge.launch(
            round.then(lambda roll: roll.weight),
            contribute=round.own.weight != 0 and sends,
            step=worker.step,
            what=f"merge {state.merges + 1} of the models",
        )
        state.round, worker.has_news = round, False

    @override
    def restore(self, worker: Worker) -> None:
        """x ← P, which is kept for this; a merge in flight lands on it."""
        worker.state.merge.restore()
        worker.forget_not_finite()

    def _land(self, worker: Worker) -> bool:
        """Apply the merge in flight, if there is one: x ← x + (P − s). Waits for it."""
        state: AsyncState = worker.state
        merge = state.merge
        if not merge.flying:
            return False
        self._arrive(state, worker.size)
        state.distance = 0.0
        if self.discrepancy_every is not None and (state.merges + 1) % self.discrepancy_every == 0:
            state.distance = merge.distance()
        merge.land(worker.moves)
        state.merges += 1
        state.merged_steps += merge.launched_step - state.merged_step
        state.merged_step = merge.launched_step
        state.merge_seconds += (merge.arrived_seconds or 0.0) - merge.launched_seconds
        worker.steps_since_sync = worker.step - merge.launched_step
        return True

    def _arrive(self, state: AsyncState, workers: int) -> None:
        """Wait for the merge in flight, and take what its roll told."""
        if state.round is not None:
            roll, state.round = state.round.wait(), None
            if self.discrepancy_every is not None and roll.measure and roll.stepping:
                state.distances.append(roll.measure / workers)
        state.merge.wait()

    def _report(self, worker: Worker, merged: bool) -> None:
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

    @override
    def consensus(self, worker: Worker, roll: Roll, *, final: bool) -> None:
        """The mean of all models with the merge in flight applied; a look leaves it in flight.

        Every worker's model counts once: a reset keeps their mean, whoever is ahead.
        """
        if final:
            self._report(worker, self._land(worker))
        else:
            self._arrive(worker.state, worker.size)
            worker.state.merge.show(worker.moves)
        worker.average_all(1.0, worker.size, final=final)

    @override
    def before_save(self, worker: Worker, meet: Callable[[], object]) -> None:
        """Let the merge in flight arrive. Eager workers may be in different merges: they meet."""
        if self.schedule == "eager":
            meet()
        self._arrive(worker.state, worker.size)
