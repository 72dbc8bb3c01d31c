"""SelSync: synchronize when the gradient changes, go on locally when it does not."""

import logging
import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from typing_extensions import override

from offbeat.fabric import Completed, Handle
from offbeat.means import GradientMean
from offbeat.significance import RelativeChange, ThresholdController
from offbeat.strategies.base import (
    Averages,
    NonFinite,
    Part,
    Roll,
    Round,
    Rounds,
    Strategy,
    Vote,
    Worker,
    setting,
    transient,
)

logger = logging.getLogger("offbeat")
_TARGET_LSSR = 0.9
_PAPER_WINDOW = 25  # steps


@dataclass
class SelSyncState:
    """The trigger; lists have one entry an optimizer with ``aggregate="gradients"``, else one."""

    changes: list[RelativeChange]
    rounds: list[int]  # since the last synchronization; the same on all workers
    decided: list[int]  # in all; the same on all workers
    controller: ThresholdController | None
    means: list[GradientMean] = transient()  # with aggregate="gradients"
    squared: list[float] = transient()  # ‖g‖² of this iteration so far
    # With deferred flags the rolls of the round before; `late` once checkpointed.
    before: dict[int, Handle[tuple[float, float]]] = transient(default_factory=dict)
    late: dict[int, list[float]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, repr=False)
class SelSync(Strategy):
    """Selective synchronization by the relative change of the gradient.

    **Update**, on each worker, N workers:

        s = ‖g‖²                                    before clipping, after AMP unscaling
        m_i = (1 − a)·m_{i−1} + a·s,  m_0 = s       a = N/100 unless ``smoothing`` is given
        Δ = |m_i − m_{i−1}| / m_{i−1}               ∞ at the first step, 0/0 = 0
        flag = Δ ≥ δ                                one number from each worker, every step
        aggregate="parameters":  x ← T(x, g);  if any flag: x ← mean(x)
        aggregate="gradients":   if any flag: g ← mean(g);  x ← T(x, g)

    Args:
        delta: A fixed δ ≥ 0. 0 synchronizes every step (BSP), ``inf`` never. Not portable between
            models, batch sizes, smoothings and numbers of workers.
        target_lssr: Instead of ``delta``, the wanted share of local steps in (0, 1); 0.9 if neither
            is given. δ is then set to the workers' mean Δ as soon as one is known, and follows what
            their triggers say from there, the same on all workers.
        aggregate: What a synchronization averages. The paper found parameters better: gradients
            leave the workers' models apart.
        smoothing: a in (0, 1]; None is N/100, at most 1.
        window: Smooth over this many last steps only, instead of all (the paper uses 25).
        max_interval: Synchronize at the latest this many steps after the last time (≥ 1).
        warmup_steps: Synchronize at each of the first steps (≥ 0).
        flags: "blocking" waits for the others' flags, exchanged while the optimizer steps;
            "deferred" acts one step later on flags that have had a whole step to arrive; its first
            step never synchronizes.

    A norm that is not finite asks for nothing and leaves m alone. After more than two in a row the
    next finite one counts as the first of all: m begins anew, and Δ = ∞ brings the workers
    together. ``Stats.details`` count ``norms_not_finite``, and the first one is logged.

    What ``warmup_steps`` and ``max_interval`` force does not move δ. So ``target_lssr`` is the
    share of steps at which no trigger fires, and forced synchronizations come on top of the others.

    *Communication*: seven numbers a step, and the model (or gradient) when any worker's flag is
    set; 1/(1 − LSSR) times less than BSP. *Memory*: one flat copy of the model. *State*: m, the
    threshold, the steps since the last synchronization; kept in checkpoints.

    *Differs from the paper*: ``target_lssr``, ``max_interval``, ``warmup_steps`` and deferred flags
    are ours. From its published code, where that contradicts the paper, in all of it: the local
    update comes first, norms are squared and smoothed once, Δ is taken before clipping.

    Source: Tyagi & Swany, arXiv 2307.07950, Algorithm 1 and Equations 1-2.
    """

    name: ClassVar[str] = "selsync"
    adapts: ClassVar[bool] = True
    continues: ClassVar[bool] = True
    delta: float | None = setting(None, least=0, finite=False, hint="0 is BSP, inf never syncs")
    target_lssr: float | None = setting(None, above=0, below=1)
    aggregate: Literal["parameters", "gradients"] = "parameters"
    smoothing: float | None = setting(None, above=0, most=1)
    window: int | None = setting(None, least=1)
    max_interval: int | None = setting(None, least=1)
    warmup_steps: int = setting(0, least=0)
    flags: Literal["blocking", "deferred"] = "blocking"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target_lssr is not None and self.delta is not None:
            raise ValueError(
                "target_lssr finds the threshold itself: give delta or target_lssr, not both"
            )
        if self.target_lssr is None and self.delta is None:
            object.__setattr__(self, "target_lssr", _TARGET_LSSR)

    @classmethod
    def paper(cls, delta: float = 0.3) -> "SelSync":
        """The setting of the paper: a fixed δ and a = N/100 over a window of 25 steps.

        Args:
            delta: δ; the paper has 0.25, 0.3 and 0.5, with 16 workers.
        """
        return cls(delta=delta, window=_PAPER_WINDOW)

    @property
    def averages(self) -> Averages:  # type: ignore[override]
        """What a synchronization averages."""
        return "models" if self.aggregate == "parameters" else "gradients"

    @property
    def rounds(self) -> Rounds:  # type: ignore[override]
        """A mean of gradients comes before the step, one of models after it."""
        return "step" if self.aggregate == "parameters" else "gradients"

    @property
    def non_finite(self) -> tuple[NonFinite, ...]:  # type: ignore[override]
        """A gradient that is not finite is left out of a mean of gradients anyway."""
        return ("warn", "raise", "leave_out") if self.aggregate == "parameters" else ("warn",)

    @property
    def averages_state(self) -> bool:  # type: ignore[override]
        """At every mean of the parameters."""
        return self.aggregate == "parameters"

    @override
    def start(self, worker: Worker) -> SelSyncState:
        """In a later view this worker's own m goes on."""
        before: SelSyncState | None = worker.state
        averaged = worker.parts if self.aggregate == "gradients" else []
        target, count = self.target_lssr, len(averaged) or 1
        return SelSyncState(
            changes=(
                [RelativeChange(self.window) for _ in range(count)]
                if before is None
                else before.changes
            ),
            rounds=[int(self.flags == "deferred")] * count,  # its first step acts on no round
            decided=[0] * count,
            controller=None if target is None else ThresholdController(target),
            means=[
                GradientMean(
                    worker.team,
                    worker.wire,
                    part.buckets,
                    name=f"gradients of optimizer {part.index}, bucket",
                )
                for part in averaged
            ],
            squared=[0.0] * count,
        )

    @override
    def kept(self, worker: Worker) -> dict[str, Any]:
        """The threshold, and how many rounds there were."""
        controller = worker.state.controller
        threshold = None if controller is None else [controller.delta, controller.steps]
        return {"decided": worker.state.decided, "threshold": threshold}

    @override
    def take_up(self, worker: Worker, kept: dict[str, Any]) -> None:
        state: SelSyncState = worker.state
        state.decided = kept["decided"]
        if state.controller is not None:
            state.controller.delta, state.controller.steps = kept["threshold"]

    @override
    def gradients(self, worker: Worker, part: Part) -> None:
        """s ← ‖g‖², before anything clips it."""
        squared: list[float] = worker.state.squared
        squared[part.index % len(squared)] += worker.squared_norm(part.gradients())

    @override
    def due(self, worker: Worker) -> bool:
        return True  # flags are exchanged every step

    @override
    def finite(self, worker: Worker, part: int, *, stepping: bool) -> bool:
        """Its norm is measured in every step, so a mean of models needs no further look."""
        if self.aggregate == "gradients":
            return True  # see ``act``
        if not stepping:
            return worker.finite_model()
        return worker.scaled or math.isfinite(sum(worker.state.squared))

    @override
    def vote(self, worker: Worker, part: int, *, stepping: bool, finishing: bool) -> Vote:
        """Δ, and whether it asks for a synchronization."""
        if not stepping:
            return Vote()
        state: SelSyncState = worker.state
        squared, state.squared[part] = state.squared[part], 0.0
        if self.aggregate == "parameters":
            worker.norm_squared = squared  # clip_grad_norm_ needs it, too
        if not math.isfinite(squared):
            self._tell(worker)
        smoothing = min(1.0, worker.size / 100) if self.smoothing is None else self.smoothing
        change = state.changes[part].update(squared, smoothing)
        delta = (self.delta or 0.0) if state.controller is None else state.controller.delta
        # Δ is ∞ at the first step, and ∞ ≥ ∞: a threshold that nothing reaches must stay so.
        flag = change >= delta and delta != math.inf
        worker.record.update(change=change, threshold=delta, flag=flag)
        worker.details["flags"] = worker.details.get("flags", 0) + flag
        return Vote(flag=flag, measure=change if math.isfinite(change) else 0.0)

    @override
    def act(self, worker: Worker, round: Round) -> bool:
        """If any flag is set: x ← mean(x), or g ← mean(g) over those whose gradient is finite."""
        state: SelSyncState = worker.state
        if not self._decides(state, round):
            return False
        if self.aggregate == "parameters":
            # Weighted as in this round: deferred flags are a step old, and since then a worker that
            # has finished may have been averaged, and must not count again.
            worker.average(round.wait())
        else:
            finite = state.changes[round.part].not_finite == 0
            state.means[round.part].reduce([], contribute=round.own.stepping and finite)
            worker.steps_since_sync = 0
        return True

    def _decides(self, state: SelSyncState, round: Round) -> bool:
        """Whether to synchronize. Every worker takes part in every round, so all decide alike."""
        part, result = round.part, round.then(_decision)
        if self.flags == "deferred":
            before = state.before.get(part)
            state.before[part] = result
            if before is None:
                return False
            result = before
        flags, mean_change = result.wait()
        if state.controller is not None:
            state.controller.update(flags > 0, mean_change)
        state.rounds[part] += 1
        state.decided[part] += 1
        overdue = self.max_interval is not None and state.rounds[part] >= self.max_interval
        synchronizes = flags > 0 or overdue or state.decided[part] <= self.warmup_steps
        if synchronizes:
            state.rounds[part] = 0
        return synchronizes

    @override
    def before_save(self, worker: Worker, meet: object) -> None:
        """Keep the deferred rolls, which the next step will act on."""
        state: SelSyncState = worker.state
        state.late = {part: list(result.wait()) for part, result in state.before.items()}

    @override
    def after_load(self, worker: Worker) -> None:
        state: SelSyncState = worker.state
        state.before = {part: Completed((late[0], late[1])) for part, late in state.late.items()}

    def _tell(self, worker: Worker) -> None:
        """Count a norm that is not finite; the first one is logged."""
        count = worker.details["norms_not_finite"] = worker.details.get("norms_not_finite", 0) + 1
        if count == 1:
            logger.warning(
                "rank %d: the gradient is not finite at step %d, so SelSync asks for nothing there "
                "(Stats.details count such steps; a worker whose model has become NaN stays so "
                "until a checkpoint is loaded)",
                worker.rank,
                worker.step,
            )


def _decision(roll: Roll) -> tuple[float, float]:
    """Of a roll: how many ask for a synchronization, and the mean Δ of those that step."""
    return float(roll.flag), roll.measure / max(1, roll.stepping)
