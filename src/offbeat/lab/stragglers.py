"""Artificial stragglers: sleeps that lengthen the steps of real workers."""

import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor, nn

from offbeat.lab.recipes import Task
from offbeat.lab.step_time import LocalTraining

_PURPOSE = 0x756E6576  # makes the random numbers differ from others with the same seed


class StragglerLoss:
    """A task's loss function with a sleep in each call, to emulate a slower worker.

    For the step time t without communication:

        sleep = t · (slowdown · (1 + jitter·|z|) − 1),  z ~ N(0, 1)

    Jitter only lengthens steps, because a worker cannot be made faster. z depends only on the seed,
    the rank and the number of the call. Methods with equally many calls therefore sleep equally
    long.

    Args:
        task: Task with the original loss function. Measuring t trains the task and restores it.
        batches: Function that returns a new iterator over this worker's batches, to measure t.
        slowdown: Factor on this worker's step time (≥ 1).
        jitter: Coefficient of |z| (≥ 0).
        seed: Seed of z.
        step_seconds: t in seconds. None: measure it now, as the mean over the workers (a
            collective).

    Attributes:
        step_seconds: t in seconds.
    """

    def __init__(
        self,
        task: Task,
        batches: Callable[[], Iterable[Any]],
        *,
        slowdown: float,
        jitter: float,
        seed: int,
        step_seconds: float | None = None,
    ) -> None:
        self._loss, self._slowdown, self._jitter = task.loss, slowdown, jitter
        if step_seconds is None:
            local = LocalTraining(task, 1.0, batches)
            local.measure()
            step_seconds = local.step_seconds
        self.step_seconds = step_seconds
        self._random = np.random.default_rng((seed, _PURPOSE, dist.get_rank()))

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """Compute the task's loss, sleep, and return the loss."""
        loss = self._loss(model, batch)
        factor = self._slowdown * (1 + self._jitter * abs(self._random.standard_normal()))
        time.sleep(self.step_seconds * (factor - 1))
        return loss


def parse_slow(text: str | None, workers: int) -> dict[int, float]:
    """Return rank → slowdown: ``"1=2,3=1.5"`` gives ``{1: 2.0, 3: 1.5}``.

    Raises:
        ValueError: the text has another form, a rank does not exist, or a factor is below 1 or
            infinite.
    """
    slowdowns: dict[int, float] = {}
    for part in filter(None, (text or "").split(",")):
        rank, _, factor = part.partition("=")
        try:
            slowdowns[int(rank)] = float(factor)
        except ValueError:
            raise ValueError(f"slow must be RANK=FACTOR, as in 1=2, got {part!r}") from None
    for number, times in slowdowns.items():
        if not 0 <= number < workers:
            raise ValueError(f"slow {number}={times:g}: ranks are 0 to {workers - 1}")
        if not 1 <= times < float("inf"):
            raise ValueError(f"slow {number}={times:g}: the factor must be at least 1 and finite")
    return slowdowns
