"""What a recipe is: a model, data, an optimizer, a schedule, a metric and a target."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from offbeat.arguments import require_integer
from offbeat.lab.recipes.samples import (
    Batch,
    Samples,
    as_samples,
    in_order,
    to_device,
)

_MOST_STEPS = 10**9
Schedule = Callable[[Optimizer, int], LRScheduler]
Share = dict[str, list[float]]
"""Of each metric by name, the sums over the batches of a worker's share."""


@dataclass(frozen=True)
class Setup:
    """What a run tells a recipe.

    Attributes:
        workers: Number of workers.
        epochs: Passes over the training set by all workers together.
        seed: Seed of everything random. The model is the same on all workers.
        data: Directory of the data, for recipes that need one.
    """

    workers: int
    epochs: float
    seed: int = 0
    data: Path | None = None


@dataclass(frozen=True)
class HeldOut:
    """What a model is evaluated on. Each metric is the mean of a value that every sample has.

    So the workers can share the work: each evaluates every N-th batch, and the sums are combined.
    Calling it with a model evaluates the whole.

    Attributes:
        dataset: The samples.
        scores: (model in evaluation mode, batch on its device) → by name, a value for each sample.
        batch_size: Samples evaluated at once; less where there would not be a batch for everyone.
        readers: See ``Task``.
        metrics: Means by name → metrics by name. None: the means are the metrics.
    """

    dataset: Dataset[Any]
    scores: Callable[[nn.Module, Any], Mapping[str, Tensor]]
    batch_size: int = 500
    readers: int = 0
    metrics: Callable[[dict[str, float]], dict[str, float]] | None = None

    @cached_property
    def samples(self) -> Samples:
        """The same samples, read by batches."""
        return as_samples(self.dataset)

    def batches(self, rank: int = 0, size: int = 1) -> list[list[int]]:
        """The samples of each batch of worker ``rank`` of ``size``: every ``size``-th batch."""
        every = [*range(len(self.samples))]
        at_once = min(self.batch_size, -(-len(every) // size))
        return [every[i : i + at_once] for i in range(0, len(every), at_once)][rank::size]

    def share(
        self, model: nn.Module, rank: int = 0, size: int = 1, *, most: int | None = None
    ) -> Share:
        """The sums of worker ``rank`` of ``size`` over its batches, or the first ``most`` of them.

        Leaves the model in training mode, and torch's random state as it was.

        Raises:
            ValueError: not one value for each sample.
        """
        device = device_of(model)
        chosen = self.batches(rank, size)[:most]
        readers = self.readers if device.type == "cuda" else 0
        sums: Share = {}
        model.eval()
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            for own, batch in zip(chosen, in_order(self.samples, chosen, readers), strict=True):
                for name, values in self.scores(model, to_device(batch, device)).items():
                    if values.shape != (len(own),):
                        raise ValueError(
                            f"an evaluation needs one value for each of the {len(own)} samples of "
                            f"a batch, got {name!r} of shape {tuple(values.shape)}"
                        )
                    sums.setdefault(name, []).append(float(values.double().sum()))
        model.train()
        return sums

    def combine(self, shares: Sequence[Share]) -> dict[str, float]:
        """The metrics of all samples, from the shares of all workers in rank order.

        Adds up batch by batch, so that the same batches give the same bits, whoever had them.
        """
        count = len(self.samples)
        means = {}
        for name in shares[0]:
            batches = chain.from_iterable(zip_longest(*(one.get(name, []) for one in shares)))
            means[name] = sum(value for value in batches if value is not None) / count
        return means if self.metrics is None else self.metrics(means)

    def __call__(self, model: nn.Module) -> dict[str, float]:
        """The metrics by name."""
        return self.combine([self.share(model)])


@dataclass
class Task:
    """All that is needed to train, built alike on every worker.

    Attributes:
        model: The model.
        optimizer: Its optimizer.
        dataset: The training split; the same sample for the same index, augmentation apart.
        batch_size: Samples a worker takes in a step.
        loss: (model, batch on the model's device) → the loss to go back from.
        evaluate: model → metrics on the held-out split by name, the recipe's own among them.
        scheduler: Stepped once an iteration; None: the learning rate stays. In a recipe of one's
            own it may also be a function (optimizer, steps) → scheduler.
        steps: Steps each worker takes in the whole run. In a recipe of one's own 0 stands for as
            many as its epochs take.
        clip_norm: The largest norm of a gradient; longer ones are cut. None: no clipping.
        readers: Processes that prepare batches beside a training process that uses a GPU. On a CPU
            they would take the model's cores, so there are none.

    Raises:
        TypeError: ``evaluate`` is no ``HeldOut``, or a number of another type.
        ValueError: a number out of its range.
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
    readers: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.evaluate, HeldOut):
            raise TypeError(
                f"evaluate must be a HeldOut, such as accuracy(dataset, …), got {self.evaluate!r}"
            )
        require_integer("batch_size", self.batch_size, least=1)
        require_integer("steps", self.steps, least=0)

    @cached_property
    def samples(self) -> Samples:
        """The training split, read by batches."""
        return as_samples(self.dataset)

    def complete(self, setup: Setup) -> None:
        """Fill in ``steps`` and ``scheduler`` where they are left to the run."""
        self.steps = self.steps or steps_for(setup, len(self.samples), self.batch_size)
        if self.scheduler is not None and not isinstance(self.scheduler, LRScheduler):
            self.scheduler = self.scheduler(self.optimizer, self.steps)

    def advance(self) -> None:
        """After a step: no gradients, and the learning rate of the next."""
        self.optimizer.zero_grad()
        if isinstance(self.scheduler, LRScheduler):
            self.scheduler.step()

    @contextmanager
    def scaled_lr(self, factor: float) -> Iterator[None]:
        """Inside, each learning rate is ``factor`` times the schedule's, whatever kind that is.

        Schedules compute a rate from the one before or from the first, some from both, so that to
        scale what they start from would mean something else for each kind.
        """
        groups = self.optimizer.param_groups
        before = [group["lr"] for group in groups]
        for group, lr in zip(groups, before, strict=True):
            group["lr"] = lr * factor
        try:
            yield
        finally:
            for group, lr in zip(groups, before, strict=True):
                group["lr"] = lr


@dataclass(frozen=True)
class Recipe:
    """A named workload.

    Attributes:
        name: As on the command line.
        description: One line.
        metric: Which of the metrics of ``Task.evaluate`` is compared with the target.
        higher_is_better: Whether a larger metric is better.
        target: The value whose time of arrival is compared.
        epochs: Passes over the training set by all workers together, unless a run says otherwise.
        build: Makes the task.
        needs_data: What ``--data`` must hold; None when the recipe brings its own data.
        file: Where it is written, if it is a user's own.
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

    def reached(self, value: float) -> bool:
        """Whether ``value`` is at the target or better."""
        return value >= self.target if self.higher_is_better else value <= self.target


def steps_for(setup: Setup, samples: int, batch_size: int) -> int:
    """Steps per worker, so that all workers together read ``epochs`` times ``samples``.

    Raises:
        ValueError: that is less than one sample, or more steps than anyone waits for.
    """
    if setup.epochs * samples < 1:
        raise ValueError(f"{setup.epochs:g} epochs are less than one of {samples:,} samples")
    steps = setup.epochs * samples / (batch_size * setup.workers)
    if steps > _MOST_STEPS:
        raise ValueError(f"{setup.epochs:g} epochs are more than {_MOST_STEPS:,} steps")
    return math.ceil(steps)


def device_of(model: nn.Module) -> torch.device:
    """Where the model's parameters are."""
    return next(model.parameters()).device


def accuracy(
    dataset: Dataset[Any], names: dict[str, int], *, batch_size: int = 1000, readers: int = 0
) -> HeldOut:
    """An ``evaluate`` for classifiers: how often the right label is among the k likeliest.

    Args:
        dataset: Pairs of an input and its label.
        names: The name of each metric and its k; a k above the number of classes counts as that.
        batch_size: Inputs classified at once.
        readers: See ``Task``.

    Returns:
        model → shares in [0, 1] by name.
    """

    def hits(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        inputs, labels = batch
        logits = model(inputs)
        likeliest = logits.topk(min(max(names.values()), logits.shape[1])).indices
        right = likeliest == labels[:, None]
        return {name: right[:, :k].any(1) for name, k in names.items()}

    return HeldOut(dataset, hits, batch_size, readers)
