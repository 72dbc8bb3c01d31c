"""The baseline ``ideal``: BSP timed as if communication took no time.

BSP (bulk synchronous parallel) averages the gradients of all workers in every step. A *baseline* is
a method that strategies are compared with. *Virtual time* is the simulator's clock.
"""

import statistics
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch.distributed as dist
from typing_extensions import override

from offbeat.lab.evaluation import gather
from offbeat.lab.methods.base import SAVING, Attached, Baseline, Method
from offbeat.lab.recipes import Task
from offbeat.lab.recipes.base import device_of
from offbeat.lab.step_time import LocalTraining
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

    - On real processes: number of steps · step time without communication. ``LocalTraining``
      measures this step time on all workers at once, before and after the run. The mean is used,
      not the median, because the times of other methods include occasional slow steps, too.
    - In virtual time: at an evaluation, the mean of the workers' compute times, as if no worker
      had waited for the slowest one.
    """

    name: ClassVar[str] = IDEAL
    simulated: ClassVar[bool] = True
    refused: ClassVar[tuple[str, ...]] = ("wire", "injection", "log", *SAVING)

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
            return _Virtual(task, lr_scale, under(BSP()))
        local = LocalTraining(task, lr_scale, batches)
        local.measure()
        return _Measured(task, lr_scale, under(BSP()), local)


class _OnIdealNetwork(Attached):
    """BSP without its waiting time. Subclasses define the training seconds."""

    @property
    @override
    def stats(self) -> Stats:
        return replace(super().stats, wait_seconds=0.0, compute_seconds=self.seconds)


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

    def __init__(self, task: Task, lr_scale: float, sync: Synchronizer) -> None:
        super().__init__(task, lr_scale, sync)
        self._device = device_of(task.model)
        self._gathered = (0, 0.0)  # step of the last `_gather`, and its result

    @property
    @override
    def seconds(self) -> float:
        step, mean = self._gathered
        return mean if step == self.step else self.sync.stats.compute_seconds

    def _gather(self) -> None:
        """Average the compute times of all workers. A collective."""
        seconds = gather(self.sync.stats.compute_seconds, self._device, "the compute times")
        self._gathered = (self.step, statistics.mean(seconds))

    @override
    @contextmanager
    def consensus(self) -> Iterator[None]:
        with super().consensus():
            self._gather()
            yield

    @override
    def finish(self) -> None:
        super().finish()
        self._gather()
