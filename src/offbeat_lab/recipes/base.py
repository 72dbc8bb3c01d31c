"""``Recipe``, ``Setup`` and ``Task``.

A recipe is a named workload such as ``digits``. For each run, every worker calls ``recipe.build``
with a setup (number of workers, epochs, seed, data) and gets a task: the model, the data and all
else that it needs to train.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from offbeat.extend import require_integer
from offbeat_lab.recipes.datasets import Samples, as_samples
from offbeat_lab.recipes.held_out import HeldOut

_MAX_STEPS = 10**9
Schedule = Callable[[Optimizer, int], LRScheduler]
"""Function (optimizer, number of steps) → scheduler."""


@dataclass(frozen=True)
class Setup:
    """Properties of a run that a recipe needs to build a task.

    Attributes:
        workers: Number of workers.
        epochs: Number of passes over the training set, by all workers together.
        seed: Seed of all random choices, equal on all workers, so that they build the same model.
        data: Path of the data set's files, given by ``--data``. None: not given.
    """

    workers: int
    epochs: float
    seed: int = 0
    data: Path | None = None


@dataclass
class Task:
    """Everything that one worker needs to train. Every worker builds the same task.

    ``complete`` must be called before training. The decorator ``recipe`` calls it.

    Attributes:
        model: The model.
        optimizer: The optimizer of the model's parameters.
        dataset: Map-style training set. Except for random augmentation, an index must give the same
            sample on every worker.
        batch_size: Number of samples per worker and step.
        loss: Function (model, batch on the model's device) → scalar loss with a gradient.
        evaluate: Held-out data and metrics. One metric must be ``Recipe.metric``.
        scheduler: Scheduler of the learning rate, advanced once per step, or a function
            (optimizer, number of steps) → scheduler. None: the learning rate is constant.
        steps: Number of steps of each worker in the whole run. 0: computed from the epochs.
        clip_norm: Maximum norm of the gradient. None: no clipping.
        position: Number of steps that each worker would have taken with equal shares of the data.
            It advances the schedule of a run whose workers lease their data; see ``lab.leased``.
            None: each worker counts its own steps.
        lr_scale: Factor of the run on the learning rate.

    Raises:
        TypeError: ``evaluate`` is not a ``HeldOut``, or ``batch_size`` or ``steps`` is no integer.
        ValueError: ``batch_size`` or ``steps`` is out of its range.
    """

    model: nn.Module
    optimizer: Optimizer
    dataset: Dataset[Any]
    batch_size: int
    loss: Callable[[nn.Module, Any], Tensor]
    evaluate: HeldOut
    scheduler: LRScheduler | Schedule | None = None
    steps: int = 0
    clip_norm: float | None = None
    position: int | None = None
    lr_scale: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.evaluate, HeldOut):
            raise TypeError(
                f"evaluate must be a HeldOut, such as accuracy(dataset, …), got {self.evaluate!r}"
            )
        require_integer("batch_size", self.batch_size, least=1)
        require_integer("steps", self.steps, least=0)

    @cached_property
    def samples(self) -> Samples:
        """The training set, with a method that reads a batch at once."""
        return as_samples(self.dataset)

    def complete(self, setup: Setup) -> None:
        """Compute ``steps`` if it is 0, and create the scheduler.

        A second call changes nothing.
        """
        self.steps = self.steps or steps_for(setup, len(self.samples), self.batch_size)
        if self.scheduler is not None and not isinstance(self.scheduler, LRScheduler):
            self.scheduler = self.scheduler(self.optimizer, self.steps)

    def advance(self) -> None:
        """Clear the gradients and advance the scheduler by one step, or up to ``position``."""
        self.optimizer.zero_grad()
        if not isinstance(self.scheduler, LRScheduler):
            return
        if self.position is None:
            self.scheduler.step()
        while self.position is not None and self.scheduler.last_epoch < self.position:
            self.scheduler.step()

    def load_scheduler(self, state: dict[str, Any]) -> None:
        """Continue the schedule of a worker whose ``scheduler.state_dict()`` is given."""
        assert isinstance(self.scheduler, LRScheduler)
        self.scheduler.load_state_dict(state)
        rates = self.scheduler.get_last_lr()
        for group, lr in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = lr

    def position_after(self, steps: int) -> int:
        """Return ``position``, or ``steps``, a worker's number of steps, if that is None."""
        return steps if self.position is None else self.position

    @contextmanager
    def scaled_lr(self) -> Iterator[None]:
        """Multiply every learning rate by ``lr_scale`` inside the context, for one optimizer step.

        Advance the scheduler outside the context, because some schedulers compute the next rate
        from the current one.
        """
        groups = self.optimizer.param_groups
        before = [group["lr"] for group in groups]
        for group, lr in zip(groups, before, strict=True):
            group["lr"] = lr * self.lr_scale
        try:
            yield
        finally:
            for group, lr in zip(groups, before, strict=True):
                group["lr"] = lr


@dataclass(frozen=True)
class Recipe:
    """A named workload.

    Attributes:
        name: Name on the command line.
        description: One line for ``offbeat recipes``.
        metric: Name of the metric of ``Task.evaluate`` that is compared with the target.
        higher_is_better: True if larger values of the metric are better.
        target: Value of the metric. Runs are compared by the time until they reach it.
        epochs: Default number of passes over the training set, by all workers together.
        build: Function that builds the task of a worker.
        needs_data: Description of the files that ``--data`` must contain. None for recipes without
            files, and for custom recipes.
        file: Python file of a custom recipe. None: a recipe of this package.
        chance: Value of the metric that random predictions reach. None: unknown.
    """

    name: str
    description: str
    metric: str
    higher_is_better: bool
    target: float
    epochs: float
    build: Callable[[Setup], Task]
    needs_data: str | None = None
    file: Path | None = None
    chance: float | None = None

    def check_data(self, data: str | Path | None) -> None:
        """Raise ValueError if the directory ``data`` is given and the recipe does not read it."""
        if data is not None and self.needs_data is None and self.file is None:
            raise ValueError(f"data {data}: the {self.name} recipe brings its own data")


def steps_for(setup: Setup, samples: int, batch_size: int) -> int:
    """Return the number of steps of each worker: ⌈epochs · samples / (batch_size · workers)⌉."""
    if setup.epochs * samples < 1:
        raise ValueError(f"{setup.epochs:g} epochs are less than one of {samples:,} samples")
    steps = setup.epochs * samples / (batch_size * setup.workers)
    if steps > _MAX_STEPS:
        raise ValueError(f"{setup.epochs:g} epochs are more than {_MAX_STEPS:,} steps")
    return math.ceil(steps)


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the model's first parameter."""
    return next(model.parameters()).device
