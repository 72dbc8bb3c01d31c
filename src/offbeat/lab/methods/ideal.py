"""The baseline ``ideal``: BSP timed as if communication took no time.

BSP (bulk synchronous parallel) averages the gradients of all workers in every step.
"""

import heapq
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch.distributed as dist
from typing_extensions import override

from offbeat.lab.methods.base import Attached, Baseline, Method
from offbeat.lab.recipes import Task
from offbeat.lab.timing.padding import PaddedLoss
from offbeat.lab.timing.step_time import LocalTraining
from offbeat.lab.timing.time_limit import Clock
from offbeat.simulate import Compute
from offbeat.strategies import BSP, Strategy
from offbeat.synchronizer import Synchronizer
from offbeat.telemetry import Stats

IDEAL = "ideal"


@dataclass(frozen=True, kw_only=True)
class Ideal(Baseline):
    """BSP on an infinitely fast network, the speed-up limit that other methods are compared with.

    **Update**: that of BSP. The run really averages the gradients, but does not count the time of
    communication.

    **Training seconds**

    - On real processes with controlled step times (``PaddedLoss``): the sum of the planned times,
      mean over the workers.
    - On other real processes: number of steps · step time without communication. ``LocalTraining``
      measures this step time on all workers at once, before and after the run. The mean is used,
      not the median, because the times of other methods include occasional slow steps, too.
    - In virtual time: the compute time without any wait for slower workers, mean over the workers.
      With leased data: the time at the sum of the workers' speeds (``summed_speeds``).
    """

    name: ClassVar[str] = IDEAL
    simulated: ClassVar[bool] = True

    @override
    def start(
        self,
        task: Task,
        lr_scale: float,
        under: Callable[[Strategy], Synchronizer],
        batches: Callable[[], Iterable[Any]],
        timeout_seconds: float,
    ) -> Method:
        if dist.get_backend() == "simulated":
            return (_Virtual if task.position is None else _Shared)(task, lr_scale, under(BSP()))
        if isinstance(task.loss, PaddedLoss):
            return _Planned(task, lr_scale, under(BSP()), task.loss)
        local = LocalTraining(task, lr_scale, batches)
        local.measure()
        return _Measured(task, lr_scale, under(BSP()), local)


class _OnIdealNetwork(Attached):
    """BSP without its waiting time. Subclasses define the training seconds of each worker.

    These differ between workers, which nevertheless must end at the same step.
    """

    limited_clock: ClassVar[Clock] = "mean"

    @override
    def train(self, batch: Any) -> None:
        if self._task.position is not None:  # all workers take equally many steps
            self._task.position = self.step + 1
        super().train(batch)

    @override
    def combine_seconds(self, seconds: Sequence[float]) -> float:
        return statistics.mean(seconds)

    @property
    @override
    def stats(self) -> Stats:
        return replace(super().stats, wait_seconds=0.0, compute_seconds=self.seconds)


class _Planned(_OnIdealNetwork):
    """BSP on real processes with controlled step times."""

    def __init__(self, task: Task, lr_scale: float, sync: Synchronizer, loss: PaddedLoss) -> None:
        super().__init__(task, lr_scale, sync)
        self._loss = loss

    @property
    @override
    def seconds(self) -> float:
        return self._loss.planned_seconds


class _Measured(_OnIdealNetwork):
    """BSP on real processes, with a measured step time."""

    def __init__(
        self, task: Task, lr_scale: float, sync: Synchronizer, local: LocalTraining
    ) -> None:
        super().__init__(task, lr_scale, sync)
        self._local = local

    @property
    @override
    def seconds(self) -> float:
        return self.step * self.step_seconds

    @property
    @override
    def step_seconds(self) -> float:
        return self._local.step_seconds

    @override
    def finish(self) -> None:
        super().finish()
        self._local.measure()


class _Virtual(_OnIdealNetwork):
    """BSP in virtual time, where the compute time is known exactly."""

    @property
    @override
    def seconds(self) -> float:
        return self.sync.stats.compute_seconds


class _Shared(_OnIdealNetwork):
    """BSP in virtual time, timed as if faster workers took more of the data."""

    def __init__(self, task: Task, lr_scale: float, sync: Synchronizer) -> None:
        super().__init__(task, lr_scale, sync)
        world: Any = dist.group.WORLD
        cluster = world.cluster
        self._times = summed_speeds(cluster.compute, sync.size, cluster.seed)
        self._seconds = 0.0

    @override
    def train(self, batch: Any) -> None:
        super().train(batch)
        self._seconds = next(self._times)

    @property
    @override
    def seconds(self) -> float:
        return self._seconds


def summed_speeds(compute: Compute, workers: int, seed: int) -> Iterator[float]:
    """Yield the times at which workers that never wait have taken N, 2N, … steps together.

    N is the number of workers. A step in progress counts in part.
    """

    def length(rank: int, step: int, now: float) -> float:
        return compute.seconds(rank, step, seed) * compute.factor_at(rank, now)

    lengths = [length(rank, 0, 0.0) for rank in range(workers)]
    ends = [(seconds, rank, 0) for rank, seconds in enumerate(lengths)]
    heapq.heapify(ends)
    now, done, due = 0.0, 0.0, workers
    while True:
        end, rank, step = ends[0]
        speed = sum(1 / seconds for seconds in lengths)
        while done + speed * (end - now) >= due:
            now, done = now + (due - done) / speed, float(due)
            due += workers
            yield now
        now, done = end, done + speed * (end - now)
        lengths[rank] = length(rank, step + 1, now)
        heapq.heapreplace(ends, (now + lengths[rank], rank, step + 1))
