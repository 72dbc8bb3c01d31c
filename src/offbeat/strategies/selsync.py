"""SelSync: average models in the steps in which the gradient norm of any worker changes much."""

import logging
import math
from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from offbeat.strategies.base import (
    GlobalModel,
    Strategy,
    SummedVotes,
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
    """State of ``SelSync`` on one worker.

    Attributes:
        change: Computes Δ, the relative change of this worker's smoothed squared gradient norm.
        controller: Adjusts the threshold δ, which is equal on all workers. None with a fixed δ.
        decided: Number of decisions so far.
        since_sync: Number of rounds since the last synchronization.
    """

    change: RelativeChange = local()
    controller: ThresholdController | None = common(default=None)
    decided: int = common(default=0)
    since_sync: int = 0


@dataclass(frozen=True, kw_only=True, repr=False)
class SelSync(Strategy):
    """Average in the steps in which the gradient norm of any worker changes much.

    Each worker compares Δ, the relative change of its smoothed squared gradient norm m, with a
    threshold δ, and sends a *flag* (1 or 0) to the others. One flag makes all workers synchronize.

    **Update** of the parameters x with the gradient g on each of N workers. T is the optimizer's
    step:

        s = ‖g‖²                                    before clipping, after AMP unscaling
        m_i = (1 − a)·m_{i−1} + a·s,  m_0 = s       a = N/100 unless ``smoothing`` is given
        Δ = |m_i − m_{i−1}| / m_{i−1}               ∞ at the first step, 0/0 = 0
        flag = Δ ≥ δ, and δ < ∞
        x ← T(x, g);  if any flag: x ← mean(x)

    LSSR, the local-to-synchronous step ratio, is the share of steps without a synchronization.

    Args:
        delta: Fixed threshold δ ≥ 0. With 0 a flag is set in every step, as in BSP. With ``inf`` no
            flag is set, so only ``warmup_steps`` and ``max_interval`` synchronize. A good value
            depends on the model, the batch size, the smoothing and the number of workers.
        target_lssr: Target for the share of steps in which no flag is set, in (0, 1). δ begins at
            0.3. At the first step with a finite Δ > 0 it becomes the mean of the workers' Δ.
            Afterwards it is adjusted in every step. None: 0.9, unless ``delta`` is given. ``delta``
            and ``target_lssr`` cannot both be given.
        smoothing: Factor a in (0, 1]. None: N/100, at most 1.
        window: Number (≥ 1) of latest squared norms s whose weighted mean is m. The paper uses 25.
            None: m contains all s so far, by the recursion above.
        max_interval: Largest number of steps from one synchronization to the next (≥ 1). With 1
            every step synchronizes. None: no limit.
        warmup_steps: Number of steps at the start that all synchronize (≥ 0).

    A non-finite norm counts as Δ = 0 and leaves m unchanged (see ``RelativeChange``).
    ``Stats.details["norms_not_finite"]`` counts such steps.

    *Communication*: ten numbers per worker in each step, and the model in a synchronization. This
    is about (1 − LSSR) times the communication of BSP. *Memory*: one flat copy of the model. A
    quantized ``wire`` adds the quantization errors and the last mean. *State*: m, the norms in the
    window, δ, counters, and what a quantized wire adds.

    *Differs from the paper*: the paper has no ``target_lssr``, ``max_interval`` or
    ``warmup_steps``, and also averages gradients in place of parameters, which it found worse.
    Where the paper and its published code differ, this class (1) averages the parameters after the
    local step, (2) squares and smooths each norm once, and (3) measures Δ before clipping.

    Source: Tyagi & Swany, arXiv 2307.07950, Algorithm 1 and Equations 1-2.
    """

    name: ClassVar[str] = "selsync"
    delta: float | None = setting(None, least=0, finite=False, hint="0 is BSP, inf sets no flag")
    target_lssr: float | None = setting(None, above=0, below=1)
    smoothing: float | None = setting(None, above=0, most=1)
    window: int | None = setting(None, least=1)
    max_interval: int | None = setting(None, least=1)
    warmup_steps: int = setting(0, least=0)

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
        """Return SelSync as in the paper: a fixed δ, and a = N/100 over a window of 25 steps.

        Args:
            delta: Threshold δ. The paper uses 0.25, 0.3 and 0.5 with 16 workers.
        """
        return cls(delta=delta, window=_PAPER_WINDOW)

    @override
    def averages(self) -> GlobalModel:
        return GlobalModel(gradient_norm=True)

    @override
    def state(self, worker: WorkerView) -> SelSyncState:
        target = self.target_lssr
        controller = None if target is None else ThresholdController(target)
        return SelSyncState(RelativeChange(self.window), controller)

    @override
    def vote(self, worker: WorkerView) -> tuple[float, ...]:
        """Return the flag and Δ of this worker. Δ = ∞ is sent as 0."""
        if not worker.stepping:
            return (0.0, 0.0)
        state: SelSyncState = worker.state
        if not math.isfinite(worker.gradient_norm_squared):
            _count_not_finite(worker)
        smoothing = min(1.0, worker.size / 100) if self.smoothing is None else self.smoothing
        change = state.change.update(worker.gradient_norm_squared, smoothing)
        delta = (self.delta or 0.0) if state.controller is None else state.controller.delta
        # At the first step Δ = ∞. A threshold of ∞ must not set a flag even then.
        flag = change >= delta and delta != math.inf
        worker.record.update(change=change, threshold=delta, flag=flag)
        worker.details["flags"] = worker.details.get("flags", 0) + flag
        return float(flag), change if math.isfinite(change) else 0.0

    @override
    def decide(self, worker: WorkerView, sums: SummedVotes) -> float:
        """Adjust δ. Synchronize on a flag, in the warm-up, and after ``max_interval`` steps."""
        state: SelSyncState = worker.state
        flags, changes = sums.votes
        if state.controller is not None:
            state.controller.update(flags > 0, changes / max(1, sums.stepping))
        state.decided += 1
        state.since_sync += 1
        overdue = self.max_interval is not None and state.since_sync >= self.max_interval
        if flags or overdue or state.decided <= self.warmup_steps:
            state.since_sync = 0
            return math.inf
        return 0


def _count_not_finite(worker: WorkerView) -> None:
    """Count a step whose gradient norm is not finite. Log the first one."""
    count = worker.details["norms_not_finite"] = worker.details.get("norms_not_finite", 0) + 1
    if count == 1:
        logger.warning(
            "rank %d: the gradient is not finite at step %d, so SelSync takes its change as 0. "
            "Stats.details counts such steps. If the model has become NaN, load a checkpoint",
            worker.rank,
            worker.step,
        )
