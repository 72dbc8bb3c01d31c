"""Controlled step times: real workers sleep, so that a step takes a given time to compute."""

import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from offbeat import Compute
from offbeat_lab.recipes import Task
from offbeat_lab.recipes.base import device_of
from offbeat_lab.timing.step_time import PADDING, LocalTraining, now

STRAGGLERS_NEED_STEP_TIME = (
    "--jitter, --slow and speeds in a --scenario change the step time: give --step-time, as in "
    "50ms, or leave them out"
)
_NEWEST = 0.1  # weight of the newest step in the running mean of the forward times


class PaddedLoss:
    """A task's loss function that sleeps, so that each step takes a planned time to compute.

    The planned time of a step is that of the simulator: ``Compute.seconds``, which depends only on
    the rank, the number of the step, the time and the seed. The worker sleeps after the forward
    pass, before a gradient can be sent:

        sleep = planned time − forward time − r · mean forward time

    The last term estimates the rest of the step: backward pass, optimizer, next batch. r is the
    ratio of this rest to the forward time. ``measure`` measures r before the run, without
    communication. Waiting for other workers and additional work, such as encoding, therefore
    lengthen the step beyond its planned time. A step is *late* if the sleep would be negative.

    Args:
        task: Task with the original loss function.
        compute: Compute times. Its time counts from the first step of the first worker.
        rank: Rank of this worker in ``compute``.
        seed: Seed of the jitter.

    Attributes:
        steps: Number of steps.
        late_steps: Number of late steps.
        planned_seconds: Sum of the planned times of all steps.
    """

    def __init__(self, task: Task, compute: Compute, *, rank: int, seed: int) -> None:
        self._loss, self._device = task.loss, device_of(task.model)
        self._compute, self._rank, self._seed = compute, rank, seed
        self._measured: list[tuple[float, float]] | None = None  # start and forward time of steps
        self._forward = self._ratio = self._overslept = 0.0
        self._began: float | None = None  # start of the first step
        self.steps = self.late_steps = 0
        self.planned_seconds = 0.0

    def measure(self, task: Task, batches: Callable[[], Iterable[Any]]) -> None:
        """Measure r on all workers at once. A collective.

        Args:
            task: The task, whose loss function is this object. It is trained and restored.
            batches: Function that returns a new iterable over this worker's batches.
        """
        measured = self._measured = list[tuple[float, float]]()
        LocalTraining(task, batches, PADDING).measure()
        self._measured = None
        starts, forwards = zip(*measured[PADDING.warmup_steps :], strict=True)
        self._forward = statistics.mean(forwards)
        step_seconds = (starts[-1] - starts[0]) / (len(starts) - 1)
        self._ratio = max(0.0, step_seconds / self._forward - 1)

    def state(self) -> tuple[float | None, float, float]:
        """Return the values that a worker which joins on this machine takes over by ``load``."""
        return self._began, self._forward, self._ratio

    def load(self, state: tuple[float | None, float, float]) -> None:
        """Continue with the values of another worker, in place of ``measure``."""
        self._began, self._forward, self._ratio = state

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """Compute the task's loss, sleep (except during ``measure``), and return the loss."""
        start = now(self._device)
        loss = self._loss(model, batch)
        forward = now(self._device) - start
        if self._measured is not None:
            self._measured.append((start, forward))
            return loss
        if self._began is None:
            self._began = start
        elapsed = start - self._began
        planned = self._compute.seconds(self._rank, self.steps, elapsed, self._seed)
        self.steps += 1
        self.planned_seconds += planned
        self._forward += _NEWEST * (forward - self._forward)
        rest = planned - forward - self._ratio * self._forward
        self.late_steps += rest < 0
        wanted = max(0.0, rest - self._overslept)
        time.sleep(wanted)
        self._overslept = now(self._device) - start - forward - wanted
        return loss


def parse_slow(text: str | None, workers: int) -> dict[int, float]:
    """Return rank → slowdown: ``"1=2,3=1.5"`` gives ``{1: 2.0, 3: 1.5}``."""
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
