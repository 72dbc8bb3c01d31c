"""The baseline ``ideal``: BSP timed as if communication took no time.

BSP (bulk synchronous parallel) averages the gradients of all workers in every step.
"""

import heapq
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
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
        loss = task.loss
        if dist.get_backend() == "simulated":
            sync = under(BSP())
            if task.position is None:
                return _OnIdealNetwork(task, lr_scale, sync, lambda: sync.stats.compute_seconds)
            return _OnIdealNetwork(task, lr_scale, sync, _shared_clock(sync))
        if isinstance(loss, PaddedLoss):
            return _OnIdealNetwork(task, lr_scale, under(BSP()), lambda: loss.planned_seconds)
        local = LocalTraining(task, lr_scale, batches)
        local.measure()
        return _Measured(task, lr_scale, under(BSP()), local)


class _OnIdealNetwork(Attached):
    """BSP without its waiting time.

    ``clock`` returns the training seconds of this worker. They differ between workers, which
    nevertheless must end at the same step.
    """

    limited_clock: ClassVar[Clock] = "mean"

    def __init__(
        self, task: Task, lr_scale: float, sync: Synchronizer, clock: Callable[[], float]
    ) -> None:
        super().__init__(task, lr_scale, sync)
        self._clock = clock

    @property
    @override
    def seconds(self) -> float:
        return self._clock()

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


class _Measured(_OnIdealNetwork):
    """BSP on real processes, with a measured step time."""

    def __init__(
        self, task: Task, lr_scale: float, sync: Synchronizer, local: LocalTraining
    ) -> None:
        super().__init__(task, lr_scale, sync, lambda: self.step * local.step_seconds)
        self._local = local

    @property
    @override
    def step_seconds(self) -> float:
        return self._local.step_seconds

    @override
    def finish(self) -> None:
        super().finish()
        self._local.measure()


def _shared_clock(sync: Synchronizer) -> Callable[[], float]:
    """Return a clock in virtual time, as if faster workers took more of the data."""
    world: Any = dist.group.WORLD
    times = [0.0]
    later = summed_speeds(world.cluster.compute, sync.size, world.cluster.seed)

    def clock() -> float:
        times.extend(islice(later, sync.step + 1 - len(times)))
        return times[sync.step]

    return clock


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
