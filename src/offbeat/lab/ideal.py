"""What BSP would do on an infinitely fast network: the floor to measure methods against."""

import copy
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from typing_extensions import override

from offbeat.lab.evaluation import gather
from offbeat.lab.methods.base import SAVING, Attached, Baseline, Method
from offbeat.lab.recipes import Task
from offbeat.lab.recipes.base import device_of
from offbeat.strategies import BSP, Strategy
from offbeat.synchronizer import Synchronizer
from offbeat.telemetry import Stats

IDEAL = "ideal"
WARMUP_STEPS = 5
"""Steps of a stretch alone that are not timed: the first ones allocate and choose kernels."""
LEAST_STEPS = 10
"""Steps of a stretch that are timed, at least."""
LEAST_SECONDS = 4.0
"""How long a stretch is timed, at least."""


@dataclass(frozen=True, kw_only=True)
class Ideal(Baseline):
    """BSP on an infinitely fast network: its samples, at the step time of a worker alone.

    **Update**: that of BSP.

    **Clock**: steps · the step time of a worker that trains without communicating, beside N−1
    others that do the same. On processes it is measured before the run and after it: each time
    ``WARMUP_STEPS`` steps, then at least ``LEAST_STEPS`` steps and ``LEAST_SECONDS``. It is the
    mean over these steps of both times, and over the workers: the clocks of other methods are sums,
    of which slow steps are a part, too. What the network costs meanwhile does not count. In virtual
    time it is what the workers compute, their mean: nobody waits for the slowest.
    """

    name: ClassVar[str] = IDEAL
    simulated: ClassVar[bool] = True
    refused: ClassVar[tuple[str, ...]] = (
        "wire",
        "injection",
        "log",
        *SAVING,
    )

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
        alone = Alone(task, lr_scale, batches)
        alone.measure()
        return _Timed(task, lr_scale, under(BSP()), alone)


@dataclass(frozen=True)
class Stretch:
    """How long workers train alone.

    Attributes:
        warmup_steps: Those that are not timed.
        least_steps: That are timed, at least.
        least_seconds: For how long they are, at least.
    """

    warmup_steps: int
    least_steps: int
    least_seconds: float


class Alone:
    """The time of a step of a worker that trains alone, beside the others that do the same.

    Args:
        task: What is trained; ``measure`` leaves model, optimizer and random states as they were.
        lr_scale: Factor on the learning rate.
        batches: What this worker reads, anew each time.
        stretch: How long each time; None: that of ``Ideal``.

    Attributes:
        step_seconds: The mean over all steps so far, and over the workers.
    """

    def __init__(
        self,
        task: Task,
        lr_scale: float,
        batches: Callable[[], Iterable[Any]],
        stretch: Stretch | None = None,
    ) -> None:
        self._task, self._lr_scale, self._batches = task, lr_scale, batches
        self._stretch = stretch or Stretch(WARMUP_STEPS, LEAST_STEPS, LEAST_SECONDS)
        self._device = device_of(task.model)
        self._steps: list[float] = []
        self.step_seconds = 0.0

    def measure(self) -> None:
        """Train for a while. A collective, so that all workers do so at the same time."""
        gather(None, self._device, "the start of a stretch alone")
        with _put_back(self._task):
            self._train()
        own = statistics.mean(self._steps)
        self.step_seconds = statistics.mean(gather(own, self._device, "the step times alone"))

    def _train(self) -> None:
        endless = chain.from_iterable(self._batches() for _ in repeat(None))
        stretch = self._stretch
        taken: list[float] = []
        ends = [self._now()]
        # All begin together, and end after the same time: nobody is timed beside idle cores.
        for batch in endless:
            self._step(batch)
            ends.append(self._now())
            taken.append(ends[-1] - ends[-2])
            timed = taken[stretch.warmup_steps :]
            if len(timed) >= stretch.least_steps and sum(timed) >= stretch.least_seconds:
                break
        self._steps += taken[stretch.warmup_steps :]

    def _step(self, batch: Any) -> None:
        """The work of ``Attached.train``, without the schedule: it may end before the stretch."""
        task = self._task
        with task.scaled_lr(self._lr_scale):
            task.loss(task.model, batch).backward()
            if task.clip_norm is not None:
                nn.utils.clip_grad_norm_(task.model.parameters(), task.clip_norm)
            task.optimizer.step()
        task.optimizer.zero_grad()

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


@contextmanager
def _put_back(task: Task) -> Iterator[None]:
    """Afterwards model, optimizer and random states are as they were."""
    tensors = [*task.model.parameters(), *task.model.buffers()]
    before = [tensor.detach().clone() for tensor in tensors]
    optimizer = copy.deepcopy(task.optimizer.state_dict())
    states = random.getstate(), np.random.get_state()
    devices = [device_of(task.model)] if device_of(task.model).type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    task.optimizer.load_state_dict(optimizer)
    with torch.no_grad():
        for tensor, value in zip(tensors, before, strict=True):
            tensor.copy_(value)


class _OverBSP(Attached):
    """The values of BSP; the clock is the subclass's."""

    @property
    @override
    def stats(self) -> Stats:
        """Those of BSP, apart from the time."""
        return replace(super().stats, wait_seconds=0.0, compute_seconds=self.seconds)


class _Timed(_OverBSP):
    """On processes: every step counts what one alone takes."""

    def __init__(self, task: Task, lr_scale: float, sync: Synchronizer, alone: Alone) -> None:
        super().__init__(task, lr_scale, sync)
        self._alone = alone

    @property
    @override
    def seconds(self) -> float:
        return self.step * self.step_seconds

    @property
    @override
    def step_seconds(self) -> float:
        return self._alone.step_seconds

    @override
    def finish(self) -> None:
        super().finish()
        self._alone.measure()


class _Virtual(_OverBSP):
    """In virtual time, where computing is known apart from waiting: the mean of the workers'."""

    def __init__(self, task: Task, lr_scale: float, sync: Synchronizer) -> None:
        super().__init__(task, lr_scale, sync)
        self._device = device_of(task.model)
        self._mean = (0, 0.0)  # the last step at which all have met, and their mean then

    @property
    @override
    def seconds(self) -> float:
        step, mean = self._mean
        return mean if step == self.step else self.sync.stats.compute_seconds

    def _meet(self) -> None:
        own = self.sync.stats.compute_seconds
        mean = statistics.mean(gather(own, self._device, "the computing of all workers"))
        self._mean = (self.step, mean)

    @override
    @contextmanager
    def consensus(self) -> Iterator[None]:
        with super().consensus():
            self._meet()
            yield

    @override
    def finish(self) -> None:
        super().finish()
        self._meet()
