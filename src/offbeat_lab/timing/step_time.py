"""Measurement of the *local step time*: the time of a training step without communication.

The reference ``ideal``, which is BSP timed without communication, takes this time for each step.
"""

import copy
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from offbeat_lab.evaluation import gather
from offbeat_lab.recipes import Setup, Task, find_recipe
from offbeat_lab.recipes.base import device_of
from offbeat_lab.recipes.custom import try_out
from offbeat_lab.samplers import Batches, make_sampler


@dataclass(frozen=True)
class Duration:
    """Length of one measurement.

    Attributes:
        warmup_steps: Number of untimed steps at the start, which allocate memory and choose
            kernels.
        least_steps: Minimum number of timed steps.
        least_seconds: Minimum time of the timed steps.
    """

    warmup_steps: int
    least_steps: int
    least_seconds: float


REFERENCE = Duration(warmup_steps=5, least_steps=10, least_seconds=4.0)
"""Duration of a measurement of the ideal's step time, before or after the training."""
PADDING = Duration(warmup_steps=3, least_steps=10, least_seconds=1.0)
"""Duration of the measurement before a run with controlled step times; see ``padding``."""


def now(device: torch.device) -> float:
    """Return the wall clock in seconds, after all work queued on ``device`` has ended."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class LocalTraining:
    """Trains on all workers at the same time, without communication, and times the steps.

    Args:
        task: Task to train. ``measure`` restores model, optimizer and random states at its end.
        batches: Function that returns a new iterator over this worker's batches.
        duration: Duration of each measurement; None: ``REFERENCE``.

    Attributes:
        step_seconds: Mean over the timed steps of all measurements and over the workers. 0 before
            the first measurement.
    """

    def __init__(
        self,
        task: Task,
        batches: Callable[[], Iterable[Any]],
        duration: Duration | None = None,
    ) -> None:
        self._task, self._batches = task, batches
        self._duration = duration or REFERENCE
        self._device = device_of(task.model)
        self._steps: list[float] = []
        self.step_seconds = 0.0

    def measure(self) -> None:
        """Train for the duration and update ``step_seconds``. A collective."""
        # All workers start together and train for about the same time. Otherwise one would be timed
        # while other cores are idle.
        gather(None, self._device, "the start of local training")
        with _state_restored(self._task):
            self._train()
        mean = statistics.mean(self._steps)
        self.step_seconds = statistics.mean(gather(mean, self._device, "the local step times"))

    def _train(self) -> None:
        duration, timed = self._duration, list[float]()
        batches = chain.from_iterable(self._batches() for _ in repeat(None))
        for number, seconds in enumerate(_step_times(self._task, batches)):
            if number >= duration.warmup_steps:
                timed.append(seconds)
            if len(timed) >= duration.least_steps and sum(timed) >= duration.least_seconds:
                break
        self._steps += timed


def _step_times(task: Task, batches: Iterable[Any]) -> Iterator[float]:
    """Train on ``batches`` without a strategy. Yield the duration of each step in seconds."""
    device = device_of(task.model)
    start = now(device)
    for batch in batches:
        with task.scaled_lr():
            _train_on(task, batch)
        # The scheduler is not advanced, because it has only as many steps as the run.
        task.optimizer.zero_grad()
        end = now(device)
        yield end - start
        start = end


def _train_on(task: Task, batch: Any) -> None:
    task.loss(task.model, batch).backward()
    if task.clip_norm is not None:
        nn.utils.clip_grad_norm_(task.model.parameters(), task.clip_norm)
    task.optimizer.step()


@contextmanager
def _state_restored(task: Task) -> Iterator[None]:
    """Restore model, optimizer and random states at the end, also after an error."""
    tensors = [*task.model.parameters(), *task.model.buffers()]
    before = [tensor.detach().clone() for tensor in tensors]
    optimizer = copy.deepcopy(task.optimizer.state_dict())
    states = random.getstate(), np.random.get_state()
    device = device_of(task.model)
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        task.optimizer.load_state_dict(optimizer)
        with torch.no_grad():
            for tensor, value in zip(tensors, before, strict=True):
                tensor.copy_(value)


_WARMUP_STEPS, _TIMED_STEPS = 5, 30


def measure_recipe(name: str, *, data: Path | None = None) -> tuple[float, float, float]:
    """Return the time of a recipe's step on this machine: 10, 25 and 90 % quantiles, in seconds.

    A step reads the batch and runs the forward pass, the backward pass and the optimizer. Other
    programs lengthen steps and never shorten them, so the 25 % quantile is the step time. The
    measurement uses torch's current number of threads.

    ``name`` is the name of a recipe or the path of its file, and ``data`` the directory of its
    data, if it needs one.
    """
    recipe = find_recipe(name)
    with torch.random.fork_rng(devices=[]):
        task = recipe.build(Setup(workers=1, epochs=recipe.epochs, data=data))
        if recipe.file is not None:
            try_out(recipe, task)
        batches = chain.from_iterable(
            Batches(task, make_sampler(task, 1, 0, seed=0)) for _ in repeat(None)
        )
        steps = islice(_step_times(task, batches), _WARMUP_STEPS + _TIMED_STEPS)
        low, quarter, high = np.quantile([*steps][_WARMUP_STEPS:], (0.1, 0.25, 0.9))
    return float(low), float(quarter), float(high)
