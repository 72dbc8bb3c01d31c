"""How much the gradient changed: SelSync's trigger, and a controller of its threshold.

Source: Tyagi & Swany, "Accelerating Distributed ML Training via Selective Synchronization",
IEEE CLUSTER 2023, arXiv 2307.07950.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

_SMALL = 2**15  # elements; smaller gradients share one call, which costs as much as reading 20,000
_LARGE = 2**18  # from here on the CPU norms _ROWS rows: torch norms whole tensors in one thread
_ROWS = 8
_OVERFLOWS = 2  # in a row, as a GradScaler looks for its scale


def squared_norm(gradients: Iterable[Tensor]) -> float:
    """‖g‖²: the squared L2 norm over all ``gradients`` together, accumulated in float32 or wider.

    Reads each gradient once. Sparse gradients are coalesced first.
    """
    parts: list[Tensor] = []
    small: dict[tuple[torch.dtype, int], list[Tensor]] = {}  # by dtype and device
    for gradient in gradients:
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        count = values.numel()
        if count >= _SMALL:
            parts.append(_norm(values))
        elif count:
            small.setdefault((values.dtype, values.get_device()), []).append(values.reshape(-1))
    parts += [_norm(torch.cat(group)) for group in small.values()]
    if not parts:
        return 0.0
    devices = {part.device for part in parts}
    if len(devices) > 1 or parts[0].device.type == "cpu":
        return sum(value * value for value in (part.item() for part in parts))  # may be ∞
    return float(torch.stack([part.double() for part in parts]).square().sum().item())


def _norm(values: Tensor) -> Tensor:
    dtype = torch.float32 if values.dtype in (torch.float16, torch.bfloat16) else None
    count = values.numel()
    if count >= _LARGE and not count % _ROWS and values.is_cpu and values.is_contiguous():
        values = torch.linalg.vector_norm(values.view(_ROWS, -1), dim=1, dtype=dtype)
    norm: Tensor = torch.linalg.vector_norm(values, dtype=dtype)
    return norm


@dataclass
class RelativeChange:
    """Δ of the smoothed squared gradient norm, from one step to the next.

    **Update**, for the squared norm s of step i:

        m_i = (1 − a)·m_{i−1} + a·s_i          m_0 = s_0      (recursion)
        m_i = Σ_k (1−a)^k s_{i−k} / Σ_k (1−a)^k,  k < window   (finite window)
        Δ_i = |m_i − m_{i−1}| / m_{i−1}         Δ_0 = ∞, 0/0 = 0

    A norm that is not finite gives Δ = 0 and leaves m as it is: a GradScaler lets a gradient
    overflow now and then. After more than two in a row (a model that had diverged, say, and was
    restored) m says nothing any more, and the next finite one is step 0 again.

    *State*: two floats, or ``window`` floats.

    Args:
        window: How many steps the finite window holds; None for the recursion.

    Attributes:
        not_finite: How many norms in a row were not, up to the last.
    """

    window: int | None = None
    mean: float | None = None
    recent: list[float] = field(default_factory=list)
    not_finite: int = 0

    def update(self, squared: float, smoothing: float) -> float:
        """Take in the squared norm of this step and return Δ (≥ 0, possibly ∞).

        Args:
            squared: s.
            smoothing: a, in (0, 1].
        """
        if not math.isfinite(squared):
            self.not_finite += 1
            return 0.0
        if self.not_finite > _OVERFLOWS:
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
    """Moves the threshold δ so that it is reached at a wanted share of the steps.

    **Update** after each step, with ``fired`` ∈ {0, 1}: whether any worker's Δ reached δ:

        δ ← mean Δ                                               at the first finite Δ
        log δ ← log δ + γ_i·(fired − (1 − target_lssr))          from then on
        γ_i = max(0.1, 2/√i)

    This is the Robbins-Monro recursion for the quantile of the largest Δ among the workers, so it
    needs no knowledge of their number. Because δ stays bounded, the share of steps at which it
    is not reached converges to ``target_lssr`` at a rate 1/steps. δ is the same on all workers.

    It is told what the trigger says, never of a synchronization that something else forced: it
    would take the forced ones for its own doing, raise δ at each, and find nothing above it for
    thousands of steps.

    *State*: two numbers.

    Args:
        target_lssr: Wanted share of steps at which the trigger does not fire, in (0, 1).
        delta: δ, the threshold until a finite Δ is known, > 0.
        steps: i, how many steps it has followed; 0 until a finite Δ is known.
    """

    target_lssr: float
    delta: float = 0.3
    steps: int = 0

    def update(self, fired: bool, change: float) -> None:
        """Take in whether any trigger fired, and the mean Δ of the workers, 0 if none is known."""
        if self.steps == 0:
            if change > 0:
                self.delta, self.steps = change, 1
            return
        self.steps += 1
        gain = max(0.1, 2 / math.sqrt(self.steps))
        self.delta *= math.exp(gain * (float(fired) - (1 - self.target_lssr)))
        self.delta = min(max(self.delta, 1e-12), 1e12)
