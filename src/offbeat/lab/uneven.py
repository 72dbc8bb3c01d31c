"""Real workers that compute unevenly: steps that vary, and workers that are slower than others."""

import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor, nn

from offbeat.lab.ideal import Alone
from offbeat.lab.recipes import Task

_PURPOSE = 0x756E6576  # in (seed, purpose, rank): no other draw shares the stream


class Uneven:
    """A loss that takes longer: this worker sleeps beside it.

    **Update**, for the step time t of a worker alone:

        sleep = t · (slowdown · (1 + jitter·|z|) − 1),  z ~ N(0, 1)

    A worker cannot be made faster, so the jitter lengthens steps only. All methods of a comparison
    sleep alike: z depends on seed, rank and step alone.

    Args:
        task: What is trained; it is measured without communication, and left as it was.
        batches: What this worker reads, anew each time.
        slowdown: Of this worker (≥ 1).
        jitter: Of its steps (≥ 0).
        seed: Of z.
        step_seconds: t; None: as measured now, the mean over the workers. In a comparison the first
            run measures for all, so that all sleep alike.
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
            alone = Alone(task, 1.0, batches)
            alone.measure()
            step_seconds = alone.step_seconds
        self.step_seconds = step_seconds
        self._draw = np.random.default_rng((seed, _PURPOSE, dist.get_rank()))

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """The task's loss, later."""
        loss = self._loss(model, batch)
        longer = self._slowdown * (1 + self._jitter * abs(self._draw.standard_normal()))
        time.sleep(self.step_seconds * (longer - 1))
        return loss


def parse_slow(text: str | None, workers: int) -> dict[int, float]:
    """Rank → how many times slower, from ``RANK=FACTOR,RANK=FACTOR``.

    Raises:
        ValueError: another text, a rank that there is not, or a factor below 1.
    """
    found: dict[int, float] = {}
    for part in filter(None, (text or "").split(",")):
        rank, _, factor = part.partition("=")
        try:
            found[int(rank)] = float(factor)
        except ValueError:
            raise ValueError(f"slow must be RANK=FACTOR, as in 1=2, got {part!r}") from None
    for number, times in found.items():
        if not 0 <= number < workers:
            raise ValueError(f"slow {number}={times:g}: ranks are 0 to {workers - 1}")
        if not 1 <= times < float("inf"):
            raise ValueError(f"slow {number}={times:g}: the factor must be at least 1 and finite")
    return found
