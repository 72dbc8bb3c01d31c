"""The trigger of SelSync: a measure of the change of the gradient, and a threshold for it.

A worker's trigger *fires* in a step in which ``RelativeChange`` reaches the threshold δ < ∞. The
workers then synchronize. ``ThresholdController`` adjusts δ, unless δ is fixed.

Source: Tyagi & Swany, "Accelerating Distributed ML Training via Selective Synchronization",
IEEE CLUSTER 2023, arXiv 2307.07950.
"""

import math
from dataclasses import dataclass, field

_MOST_OVERFLOWS = 2  # overflows in a row that a GradScaler may cause while it adjusts its scale


@dataclass
class RelativeChange:
    """Relative change Δ of the smoothed squared gradient norm m from one step to the next.

    **Update**, for the squared norm s_i of step i and the smoothing factor a:

        m_i = (1 − a)·m_{i−1} + a·s_i          m_0 = s_0      (recursion)
        m_i = Σ_k (1−a)^k s_{i−k} / Σ_k (1−a)^k,  k < window   (finite window)
        Δ_i = |m_i − m_{i−1}| / m_{i−1}         Δ_0 = ∞, 0/0 = 0

    A non-finite norm gives Δ = 0 and leaves m unchanged, because gradients overflow occasionally
    under a GradScaler. After more than two non-finite norms in a row the next finite norm counts as
    step 0, because m is outdated.

    Args:
        window: Number of steps in the finite window (second formula). None: the first formula.

    Attributes:
        mean: Smoothed squared norm m. None before the first finite norm.
        recent: Squared norms in the window, the latest first. Empty without a window.
        not_finite: Number of consecutive non-finite norms up to the last step.
    """

    window: int | None = None
    mean: float | None = None
    recent: list[float] = field(default_factory=list)
    not_finite: int = 0

    def update(self, squared: float, smoothing: float) -> float:
        """Add the squared norm s of a step and return Δ (≥ 0, possibly ∞). ``smoothing`` is a."""
        if not math.isfinite(squared):
            self.not_finite += 1
            return 0.0
        if self.not_finite > _MOST_OVERFLOWS:
            self.mean, self.recent = None, []
        self.not_finite = 0
        previous, self.mean = self.mean, self._smooth(squared, smoothing)
        if previous is None:
            return math.inf
        change = abs(self.mean - previous)
        if previous == 0:
            return math.inf if change else 0.0
        return change / previous

    def _smooth(self, squared: float, a: float) -> float:
        if self.window is None:
            return squared if self.mean is None else (1 - a) * self.mean + a * squared
        self.recent = [squared, *self.recent[: self.window - 1]]
        if a == 1:
            return squared
        weights = [(1 - a) ** k for k in range(len(self.recent))]
        return math.fsum(w * s for w, s in zip(weights, self.recent, strict=True)) / sum(weights)


@dataclass
class ThresholdController:
    """Adjusts the threshold δ so that no trigger fires in a given share of the steps.

    **Update** after each step. ``fired`` is 1 if the Δ of any worker reached δ, else 0:

        δ ← mean of the workers' Δ                               at the first finite Δ > 0
        log δ ← log δ + γ_i·(fired − (1 − target_lssr))          afterwards
        γ_i = max(0.1, 2/√i)

    This is the Robbins-Monro recursion for a quantile of the largest Δ among the workers. While δ
    is inside [1e-12, 1e12], the share of steps in which no trigger fires converges to
    ``target_lssr`` at a rate 1/steps.

    A synchronization without a trigger (``warmup_steps`` and ``max_interval`` of SelSync) does not
    count as ``fired``. If it did, δ would rise so far that no Δ reaches it for thousands of steps.

    Attributes:
        target_lssr: Target for the share of steps in which no trigger fires, in (0, 1).
        delta: Threshold δ > 0.
        steps: Number of steps i since the first finite Δ > 0, including that step. 0 before.
    """

    target_lssr: float
    delta: float = 0.3
    steps: int = 0

    def update(self, fired: bool, change: float) -> None:
        """Adjust δ after a step. ``change`` is the mean of the workers' Δ; Δ = ∞ counts as 0."""
        if self.steps == 0:
            if change > 0:
                self.delta, self.steps = change, 1
            return
        self.steps += 1
        gain = max(0.1, 2 / math.sqrt(self.steps))
        self.delta *= math.exp(gain * (float(fired) - (1 - self.target_lssr)))
        self.delta = min(max(self.delta, 1e-12), 1e12)
