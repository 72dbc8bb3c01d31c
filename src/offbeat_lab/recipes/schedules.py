"""The learning-rate schedule of recipes."""

import math

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
