"""The reference ``ideal``: BSP timed as if communication took no time.

BSP (bulk synchronous parallel) averages the gradients of all workers in every step.
"""

import heapq
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch.distributed as dist
from typing_extensions import override

from offbeat import BSP, Compute, Stats, Strategy, Synchronizer
from offbeat_lab.methods.base import Attached, Method, Reference
from offbeat_lab.recipes import Task
from offbeat_lab.scenario import Process
from offbeat_lab.timing.padding import PaddedLoss
from offbeat_lab.timing.step_time import LocalTraining

IDEAL = "ideal"


@dataclass(frozen=True, kw_only=True)
class Ideal(Reference):
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

    ``SharedIdeal`` trains in place of this method with leased data in virtual time, and if workers
    die or join.
    """

    name: ClassVar[str] = IDEAL
    simulated: ClassVar[bool] = True

    @override
    def start(
        self,
        task: Task,
        under: Callable[[Strategy], Synchronizer],
        batches: Callable[[], Iterable[Any]],
    ) -> Method:
        loss = task.loss
        if dist.get_backend() == "simulated":
            sync = under(BSP())
            return _Timed(task, sync, lambda: sync.stats.compute_seconds)
        if isinstance(loss, PaddedLoss):
            return _Timed(task, under(BSP()), lambda: loss.planned_seconds)
        local = LocalTraining(task, batches)
        local.measure()
        sync = under(BSP())
        return _Timed(task, sync, lambda: sync.step * local.step_seconds, local)


class _Timed(Attached):
    """BSP whose training seconds are those of ``clock``, without its waiting time.

    The seconds differ between workers, which nevertheless must end at the same step. ``local``
    measures the step time on real processes.
    """

    ends_alone: ClassVar[bool] = False

    def __init__(
        self,
        task: Task,
        sync: Synchronizer,
        clock: Callable[[], float],
        local: LocalTraining | None = None,
    ) -> None:
        super().__init__(task, sync)
        self._clock, self._local = clock, local

    @property
    @override
    def step_seconds(self) -> float | None:
        return None if self._local is None else self._local.step_seconds

    @override
    def finish(self) -> None:
        super().finish()
        if self._local is not None:
            self._local.measure()

    @property
    @override
    def seconds(self) -> float:
        return self._clock()

    @override
    def combine_seconds(self, seconds: Sequence[float]) -> float:
        return statistics.mean(seconds)

    @property
    @override
    def stats(self) -> Stats:
        return replace(super().stats, wait_seconds=0.0, compute_seconds=self.seconds)


class SharedIdeal(_Timed):
    """BSP of workers that share leased data, at the sum of their speeds. One worker computes it.

    **Update**: that of BSP. A step uses one batch for each worker that is alive. The workers may
    die and join. BatchNorm's running statistics receive these batches one after the other.

    Args:
        task: The task. Its samples are leased by this worker alone.
        sync: Synchronizer of this worker alone.
        workers: Number of workers at the start.
        steps: Time of the end of each step, in seconds, and its number of batches.
    """

    def __init__(
        self,
        task: Task,
        sync: Synchronizer,
        *,
        workers: int,
        steps: Iterator[tuple[float, int]],
    ) -> None:
        super().__init__(task, sync, lambda: self._ended)
        self._workers, self._steps, self._ended = workers, steps, 0.0  # end of the last step
        self._done = self._pending = 0  # batches of completed steps, of the step in progress
        self._next: tuple[float, int] | None = None  # the step in progress

    @override
    def train(self, batch: Any) -> None:
        task = self._task
        end, size = self._next = self._next or next(self._steps)
        size = min(size, task.steps * self._workers - self._done)
        self._backward(batch, 1 / size)
        self._pending += 1
        if self._pending == size:
            self._done, self._pending, self._ended, self._next = self._done + size, 0, end, None
        task.position = self._done // self._workers
        if not self._pending:
            self._optimize()


def summed_speeds(
    compute: Compute, processes: Sequence[Process], seed: int
) -> Iterator[tuple[float, int]]:
    """Yield the ends of BSP's steps, and the numbers of their batches, if no worker ever waits.

    A step has one batch for each worker that is alive at its start. What a worker has computed of a
    batch counts, also if it is killed.

    Args:
        compute: Compute time of the batches.
        processes: The processes of the workers, by rank. There is always one that is alive.
        seed: Seed of the jitter.
    """
    lengths: dict[int, float] = {}  # seconds of a batch, by rank
    ends = [(process.start, rank, -1) for rank, process in enumerate(processes)]
    heapq.heapify(ends)
    now, done, size = 0.0, 0.0, sum(process.start == 0 for process in processes)
    due = size
    while True:
        end, rank, step = ends[0]
        speed = sum(1 / seconds for seconds in lengths.values())
        while speed and done + speed * (end - now) >= due:
            now, done = now + (due - done) / speed, float(due)
            yield now, size
            size = len(lengths)
            due += size
        now, done = end, done + speed * (end - now)
        heapq.heappop(ends)
        lengths.pop(rank, None)
        if now < processes[rank].end:
            lengths[rank] = compute.seconds(rank, step + 1, now, seed)
            heapq.heappush(ends, (min(now + lengths[rank], processes[rank].end), rank, step + 1))
