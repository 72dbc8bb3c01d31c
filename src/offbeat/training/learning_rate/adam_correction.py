"""Longer local steps of Adam, which make up for the noise of small batches.

Adam divides its step by √v, where v is the mean squared gradient: v ≈ μ² + σ² for a gradient of
mean μ and variance σ². One Adam that trains with the mean gradient of N workers has v_N ≈ μ² + σ²/N
and takes longer steps. Workers that average models have v, so their mean step is too short, by up
to √N. The correction multiplies the learning rate of each local step by

    f = √(v / v_N)          v_N = v − (1 − 1/N)·σ²          1 ≤ f ≤ √N

σ² follows from the moments of the worker's own Adam. The first moment m averages the last gradients
with the decay β₁, and keeps a share c of their variance, m² ≈ μ² + c·σ². So σ² = (v − m²)/(1 − c).
"""

import math
from collections.abc import Sequence
from typing import Any

from torch.optim import Adam, NAdam, Optimizer

from offbeat.averaging import AttachedOptimizer, Worker
from offbeat.averaging.flat import as_real
from offbeat.averaging.norm import absolute_sum, squared_norm
from offbeat.errors import AttachError
from offbeat.nodes.shards import local_parts

_EVERY = 10  # local steps from one measurement of f to the next
# Weight of a new measurement in f. f starts at 1, and after 100 steps it has covered two thirds of
# the way to its value. Of 1, 0.3, 0.1, 0.05 and 0.03 this weight ended best, over two seeds.
_SMOOTHING = 0.1


def can_correct(optimizer: Optimizer) -> bool:
    """Return True for Adam, AdamW and NAdam, including ``amsgrad`` and subclasses."""
    return isinstance(optimizer, Adam | NAdam)


def require_correctable(optimizers: Sequence[Optimizer]) -> None:
    """Raise AttachError unless all ``optimizers`` can be corrected."""
    for optimizer in optimizers:
        if not can_correct(optimizer):
            raise AttachError(
                f"adam_correction with {type(optimizer).__name__}: it is for Adam, AdamW and NAdam "
                "of torch.optim; leave it out"
            )


class AdamCorrection:
    """Measures the factors f of a ``StepFactor`` for one optimizer that ``can_correct``.

    Each parameter group has its own f. ``Stats.details["lr_factor"]`` lists the factors of the
    groups, and is part of checkpoints. With several optimizers there are also ``lr_factor_1`` and
    so on.

    *Communication*: none, except between the shards of a node. *Computing*: one pass over both
    moments every ten steps.
    """

    def __init__(self, worker: Worker, attached: AttachedOptimizer) -> None:
        self._worker = worker
        self._name = f"lr_factor_{attached.index}" if attached.index else "lr_factor"
        self._optimizer = attached.optimizer

    def factors(self) -> list[float]:
        """Return the factor of each parameter group for the next step, and record them."""
        factors = self._known()
        self._worker.record[self._name] = [*factors]
        return factors

    def stepped(self) -> None:
        """Measure the factors at the end of every tenth step."""
        if self._worker.step % _EVERY == 0:
            self._measure()

    def _known(self) -> list[float]:
        """Return the factor of each parameter group, which is 1 for a new group."""
        known = self._worker.details.get(self._name, [])
        number = len(self._optimizer.param_groups)
        factors = self._worker.details[self._name] = [*known, *[1.0] * number][:number]
        return factors

    def _measure(self) -> None:
        """Measure the factor of each group, and move the smoothed factors toward the results."""
        factors, groups = self._known(), self._optimizer.param_groups
        states = [
            [state for p in group["params"] if (state := self._optimizer.state.get(p))]
            for group in groups
        ]
        sums = self._worker.team.sum_over_shards(*(x for each in states for x in _sums(each)))
        for i, (group, each) in enumerate(zip(groups, states, strict=True)):
            if each:
                v, m_squared = sums[2 * i : 2 * i + 2]
                # A parameter that is not used in all steps has taken fewer steps than the others.
                largest = max(each, key=lambda state: int(state["exp_avg"].numel()))
                step, size = int(largest["step"]), self._worker.size
                found = factor_of(v, m_squared, group["betas"], step, size)
                factors[i] += _SMOOTHING * (found - factors[i])


def _sums(states: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """Return the sums of Adam's v and of the squares of its m over all numbers."""
    v = [as_real(local_parts(state["exp_avg_sq"])) for state in states]
    m = [as_real(local_parts(state["exp_avg"])) for state in states]
    return absolute_sum(v), squared_norm(m)


def factor_of(
    v: float, m_squared: float, betas: tuple[float, float], step: int, workers: int
) -> float:
    """Return f for one group of parameters, from 1 to √N. 1 if the noise cannot be measured.

    It cannot be if m is the newest gradient with all of its noise: with β₁ = 0, and in the first
    step.

    Args:
        v: Sum of Adam's second moments, without bias correction.
        m_squared: Sum of the squares of its first moments, without bias correction.
        betas: β₁ and β₂.
        step: Number of steps that the moments contain. 0 if a GradScaler has skipped all of them.
        workers: N.
    """
    if step < 1:
        return 1.0
    decay, decay_2 = (float(beta) ** step for beta in betas)
    v, m_squared = v / (1 - decay_2), m_squared / (1 - decay) ** 2
    beta = float(betas[0])
    share = (1 - beta) / (1 + beta) * (1 + decay) / (1 - decay)  # c
    if not (0 < v < math.inf and m_squared < v and share < 1):
        return 1.0
    noise = min((v - m_squared) / (1 - share), v)
    return min(math.sqrt(v / (v - (1 - 1 / workers) * noise)), math.sqrt(workers))
