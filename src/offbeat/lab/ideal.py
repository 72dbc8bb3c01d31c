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

    **Update**: that of BSP. The run really averages the gradients, but the time of communication is
    not counted.

    **Training seconds**: number of steps · step time without communication.

    On real processes, ``LocalTraining`` measures this step time before and after the run, while all
    workers train without communication. It is the mean over all timed steps and all workers. A
    median would ignore occasional slow steps, which the times of other methods include.

    In virtual time, the training seconds at an evaluation are the mean of the workers' compute
    times, as if no worker had waited for the slowest one.
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
    """BSP whose waiting time is not counted. The subclass defines the training seconds."""

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
        self._gathered = (0, 0.0)  # step of the last `_gather`, and the mean compute time then

    @property
    @override
    def seconds(self) -> float:
        step, mean = self._gathered
        return mean if step == self.step else self.sync.stats.compute_seconds

    def _gather(self) -> None:
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
