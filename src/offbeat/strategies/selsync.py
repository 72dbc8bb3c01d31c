"""SelSync: synchronize when the gradient changes, continue locally when it does not."""

import logging
import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from typing_extensions import override

from offbeat.strategies.base import (
    Gradients,
    Launch,
    SharedModel,
    Strategy,
    Tally,
    WorkerView,
    common,
    local,
    setting,
)
from offbeat.strategies.trigger import RelativeChange, ThresholdController

logger = logging.getLogger("offbeat")
_TARGET_LSSR = 0.9
_PAPER_WINDOW = 25  # steps


@dataclass
class SelSyncState:
    """The trigger of one worker and the threshold that all workers share.

    Attributes:
        change: Smoothed gradient norm of this worker.
        controller: Adjusts δ; None with a fixed ``delta``.
        decided: Number of rounds decided so far.
    """

    change: RelativeChange = local()
    controller: ThresholdController | None = common(default=None)
    decided: int = common(default=0)


@dataclass(frozen=True, kw_only=True, repr=False)
class SelSync(Strategy):
    """Selective synchronization by the relative change of the gradient.

    **Update**, on each of N workers:

        s = ‖g‖²                                    before clipping, after AMP unscaling
        m_i = (1 − a)·m_{i−1} + a·s,  m_0 = s       a = N/100 unless ``smoothing`` is given
        Δ = |m_i − m_{i−1}| / m_{i−1}               ∞ at the first step, 0/0 = 0
        flag = Δ ≥ δ                                each worker votes its flag in every step
        aggregate="parameters":  x ← T(x, g);  if any flag: x ← mean(x)
        aggregate="gradients":   if any flag: g ← mean(g);  x ← T(x, g)

    Args:
        delta: A fixed δ ≥ 0. 0 synchronizes every step (BSP), ``inf`` never. Not portable between
            models, batch sizes, smoothings and numbers of workers.
        target_lssr: Instead of ``delta``, the wanted share of steps at which no trigger fires, in
            (0, 1); 0.9 if neither is given. δ starts at the workers' first mean Δ and follows their
            triggers from there.
        aggregate: What a synchronization averages. The paper found parameters better; gradients
            leave the workers' models apart.
        smoothing: a in (0, 1]. None: N/100, at most 1.
        window: Smooth over this many last steps instead of all. The paper uses 25.
        max_interval: The most steps between two synchronizations (≥ 1).
        warmup_steps: Number of steps at the start that all synchronize (≥ 0).
        flags: "blocking" exchanges the flags while the optimizer steps and waits for them.
            "deferred" acts on the flags of the previous step, which have had a whole step to
            arrive; the first step never synchronizes.
        optimizer_state: "average" also averages the optimizers' state at each mean of the
            parameters.

    A non-finite norm sets no flag and leaves m unchanged (see ``RelativeChange``).
    ``Stats.details`` counts ``norms_not_finite``, and the first one is logged. Synchronizations
    forced by ``warmup_steps`` and ``max_interval`` come on top of those that ``target_lssr`` aims
    at.

    *Communication*: nine numbers a step, and the model (or the gradients) if any flag is set;
    1/(1 − LSSR) times less than BSP. *Memory*: one flat copy of the model. *State*: m, δ, counters.

    *Differs from the paper*: ``target_lssr``, ``max_interval``, ``warmup_steps`` and deferred flags
    are ours. The paper's published code contradicts the paper; here the local update comes first,
    norms are squared and smoothed once, and Δ is measured before clipping.

    Source: Tyagi & Swany, arXiv 2307.07950, Algorithm 1 and Equations 1-2.
    """

    name: ClassVar[str] = "selsync"
    gradient_norm: ClassVar[bool] = True
    delta: float | None = setting(None, least=0, finite=False, hint="0 is BSP, inf never syncs")
    target_lssr: float | None = setting(None, above=0, below=1)
    aggregate: Literal["parameters", "gradients"] = "parameters"
    smoothing: float | None = setting(None, above=0, most=1)
    window: int | None = setting(None, least=1)
    max_interval: int | None = setting(None, least=1)
    warmup_steps: int = setting(0, least=0)
    flags: Literal["blocking", "deferred"] = "blocking"
    optimizer_state: Literal["local", "average"] = "local"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target_lssr is not None and self.delta is not None:
            raise ValueError(
                "target_lssr finds the threshold itself: give delta or target_lssr, not both"
            )
        if self.target_lssr is None and self.delta is None:
            object.__setattr__(self, "target_lssr", _TARGET_LSSR)
        if self.aggregate == "gradients" and self.optimizer_state == "average":
            raise ValueError(
                'optimizer_state="average" requires aggregate="parameters": a mean of gradients '
                "comes before the optimizer's step and leaves its state apart"
            )

    @classmethod
    def paper(cls, delta: float = 0.3) -> "SelSync":
        """The setting of the paper: a fixed δ and a = N/100 over a window of 25 steps.

        Args:
            delta: δ; the paper has 0.25, 0.3 and 0.5, with 16 workers.
        """
        return cls(delta=delta, window=_PAPER_WINDOW)

    @property
    @override
    def tally_delay(self) -> int:
        return int(self.flags == "deferred")

    @override
    def averages(self) -> SharedModel | Gradients:
        if self.aggregate == "gradients":
            return Gradients(every_step=False)
        return SharedModel(optimizer_state=self.optimizer_state == "average")

    @override
    def state(self, worker: WorkerView) -> SelSyncState:
        target = self.target_lssr
        controller = None if target is None else ThresholdController(target)
        return SelSyncState(RelativeChange(self.window), controller)

    @override
    def vote(self, worker: WorkerView) -> tuple[float, ...]:
        """This worker's flag and its Δ."""
        if not worker.stepping:
            return (0.0, 0.0)
        state: SelSyncState = worker.state
        if not math.isfinite(worker.gradient_norm_squared):
            _count_not_finite(worker)
        smoothing = min(1.0, worker.size / 100) if self.smoothing is None else self.smoothing
        change = state.change.update(worker.gradient_norm_squared, smoothing)
        delta = (self.delta or 0.0) if state.controller is None else state.controller.delta
        # Δ is ∞ at the first step, and ∞ ≥ ∞; δ = ∞ must never synchronize.
        flag = change >= delta and delta != math.inf
        worker.record.update(change=change, threshold=delta, flag=flag)
        worker.details["flags"] = worker.details.get("flags", 0) + flag
        return float(flag), change if math.isfinite(change) else 0.0

    @override
    def decide(self, worker: WorkerView, tally: Tally) -> Launch:
        """Synchronize if any flag is set, or if it is forced."""
        state: SelSyncState = worker.state
        flags, changes = tally.votes
        if state.controller is not None:
            state.controller.update(flags > 0, changes / max(1, tally.stepping))
        state.decided += 1
        overdue = self.max_interval is not None and worker.rounds >= self.max_interval
        if flags or overdue or state.decided <= self.warmup_steps:
            return Launch()
        return Launch(parts=0)


def _count_not_finite(worker: WorkerView) -> None:
    """Count a step whose gradient norm is not finite, and log the first."""
    count = worker.details["norms_not_finite"] = worker.details.get("norms_not_finite", 0) + 1
    if count == 1:
        logger.warning(
            "rank %d: the gradient is not finite at step %d, so SelSync sets no flag there. "
            "Stats.details counts such steps; a model that has become NaN stays so until a "
            "checkpoint is loaded",
            worker.rank,
            worker.step,
        )
