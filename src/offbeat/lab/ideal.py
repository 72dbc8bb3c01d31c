"""The baseline ``ideal``: BSP on the ideal network, the speed-up limit of every method."""

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
    """BSP on an infinitely fast network: its samples, at the step time of a worker alone.

    **Update**: that of BSP.

    **Clock**: steps · step time without communication.

    On processes, ``LocalTraining`` measures the step time on all workers at once, before the run
    and after it. The result is the mean over all timed steps and over the workers: the clocks of
    other methods are sums, which include slow steps, too. The time of this run's own communication
    does not count.

    In virtual time, the clock is the mean over the workers of their compute times. No worker waits
    for the slowest one.
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
    """BSP with the clock of a subclass."""

    @property
    @override
    def stats(self) -> Stats:
        return replace(super().stats, wait_seconds=0.0, compute_seconds=self.seconds)


class _Measured(_OnIdealNetwork):
    """BSP on processes, with a measured step time."""

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
        self._gathered = (0, 0.0)  # step of the last collective, and the mean compute time then

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
