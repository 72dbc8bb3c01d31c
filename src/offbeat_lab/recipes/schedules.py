"""Learning-rate schedules of recipes."""

import math
from bisect import bisect_right
from collections.abc import Sequence

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler


def warmup_cosine(optimizer: Optimizer, steps: int, warmup: float = 0.1) -> LRScheduler:
    """Return a scheduler: linear warm-up to the learning rate, then half a cosine down to 1 %.

    Args:
        optimizer: The optimizer.
        steps: Number of steps of the run.
        warmup: Share of the steps in the warm-up, in [0, 1]. The warm-up has at least one step.
    """
    rising = max(1, round(warmup * steps))

    def factor(t: int) -> float:
        if t < rising:
            return (t + 1) / rising
        done = (t - rising) / max(1, steps - rising)
        return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    return LambdaLR(optimizer, factor)


def decay_at(
    optimizer: Optimizer, milestones: Sequence[float], factor: float, *, samples_per_step: int
) -> LRScheduler:
    """Return a scheduler that multiplies the learning rate by ``factor`` at each milestone.

    A milestone is a number of samples that all workers together have read. For example, with 4
    workers and batches of 32, milestone 12,800 is reached after 100 steps.

    Args:
        optimizer: The optimizer.
        milestones: Numbers of samples in ascending order.
        factor: Factor on the learning rate at each milestone.
        samples_per_step: Samples that all workers read in a step: batch size × number of workers.
    """
    return LambdaLR(optimizer, lambda t: factor ** bisect_right(milestones, t * samples_per_step))


def decay_every(
    optimizer: Optimizer, samples: int, factor: float, *, samples_per_step: int
) -> LRScheduler:
    """Return a scheduler that multiplies the learning rate by ``factor`` every ``samples`` samples.

    The samples of all workers are counted together, as in ``decay_at``.
    """
    return LambdaLR(optimizer, lambda t: factor ** (t * samples_per_step // samples))
