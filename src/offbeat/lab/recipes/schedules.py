"""Learning-rate schedules of recipes."""

import math
from bisect import bisect_right
from collections.abc import Sequence

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler


def warmup_cosine(optimizer: Optimizer, steps: int, warmup: float = 0.1) -> LRScheduler:
    """A linear warm-up over the first ``warmup`` of the steps, then a half cosine to 1 %."""
    rising = max(1, round(warmup * steps))

    def factor(t: int) -> float:
        if t < rising:
            return (t + 1) / rising
        done = (t - rising) / max(1, steps - rising)
        return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    return LambdaLR(optimizer, factor)


def decay_at(
    optimizer: Optimizer, milestones: Sequence[float], factor: float, *, samples_a_step: int
) -> LRScheduler:
    """Multiply the learning rate by ``factor`` at each number of samples in ``milestones``.

    Samples are those seen by all workers: scheduler step t is t · ``samples_a_step``, so N workers
    decay after as many samples as one does, in N times fewer steps.

    Args:
        optimizer: The optimizer.
        milestones: Rising numbers of samples.
        factor: By what the rate is multiplied.
        samples_a_step: Batch size × workers.
    """
    return LambdaLR(optimizer, lambda t: factor ** bisect_right(milestones, t * samples_a_step))


def decay_every(
    optimizer: Optimizer, samples: int, factor: float, *, samples_a_step: int
) -> LRScheduler:
    """Multiply the learning rate by ``factor`` whenever all workers have seen ``samples`` more."""
    return LambdaLR(optimizer, lambda t: factor ** (t * samples_a_step // samples))
