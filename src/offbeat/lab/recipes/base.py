"""What a recipe is: a model, data, an optimizer, a schedule, a metric and a target."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler


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


@dataclass
class Task:
    """All that is needed to train, built alike on every worker.

    Attributes:
        model: The model.
        optimizer: Its optimizer.
        scheduler: Stepped once an iteration.
        dataset: The training split; items are tuples of tensors, the same for the same index.
        batch_size: Samples a worker takes in a step.
        steps: Steps each worker takes in the whole run.
        loss: (model, batch) → the loss to go back from.
        evaluate: model → the metric on the held-out split. Leaves the model in training mode.
    """

    model: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler
    dataset: "TensorData"
    batch_size: int
    steps: int
    loss: Callable[[nn.Module, Any], Tensor]
    evaluate: Callable[[nn.Module], float]


class TensorData(torch.utils.data.Dataset[tuple[Tensor, ...]]):
    """Samples held in memory; a whole batch is read by one indexing operation.

    Args:
        tensors: Tensors whose first dimension is the sample.
        change: Applied to every batch, for augmentation: (tensors of the batch) → the same.
    """

    def __init__(
        self,
        *tensors: Tensor,
        change: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]] | None = None,
    ) -> None:
        self.tensors, self._change = tensors, change

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int | list[int]) -> tuple[Tensor, ...]:
        """One sample, or the samples of a list of indices, stacked."""
        if isinstance(index, int):
            return tuple(t[0] for t in self[[index]])
        chosen = tuple(t[index] for t in self.tensors)
        return chosen if self._change is None else self._change(chosen)


@dataclass(frozen=True)
class Recipe:
    """A named workload.

    Attributes:
        name: As on the command line.
        description: One line.
        metric: What ``Task.evaluate`` returns.
        higher_is_better: Whether a larger metric is better.
        target: The value whose time of arrival is compared.
        epochs: Passes over the training set by all workers together, unless a run says otherwise.
        build: Makes the task.
        needs_data: What ``--data`` must hold; None when the recipe brings its own data.
    """

    name: str
    description: str
    metric: str
    higher_is_better: bool
    target: float
    epochs: float
    build: Callable[[Setup], Task]
    needs_data: str | None = None

    def reached(self, value: float) -> bool:
        """Whether ``value`` is at the target or better."""
        return value >= self.target if self.higher_is_better else value <= self.target


def steps_for(setup: Setup, samples: int, batch_size: int) -> int:
    """Steps per worker, so that all workers together read ``epochs`` times ``samples``."""
    return max(1, math.ceil(setup.epochs * samples / (batch_size * setup.workers)))


def warmup_cosine(optimizer: Optimizer, steps: int, warmup: float = 0.1) -> LRScheduler:
    """A linear warm-up over the first ``warmup`` of the steps, then a half cosine to 1 %."""
    rising = max(1, round(warmup * steps))

    def factor(t: int) -> float:
        if t < rising:
            return (t + 1) / rising
        done = (t - rising) / max(1, steps - rising)
        return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    return LambdaLR(optimizer, factor)


def accuracy(images: Tensor, labels: Tensor, chunk: int = 1000) -> Callable[[nn.Module], float]:
    """An ``evaluate`` for classifiers: the share of ``images`` given the right label, in [0, 1]."""

    def evaluate(model: nn.Module) -> float:
        model.eval()
        with torch.no_grad():
            parts = zip(images.split(chunk), labels.split(chunk), strict=True)
            right = sum(int((model(x).argmax(1) == y).sum()) for x, y in parts)
        model.train()
        return right / len(labels)

    return evaluate


def shift_images(batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Move each image by −1, 0 or 1 pixels in both directions, drawn from torch's generator."""
    images, *rest = batch
    n, _, height, width = images.shape
    padded = nn.functional.pad(images, (1, 1, 1, 1))
    rows = torch.randint(3, (n, 1)) + torch.arange(height)
    columns = torch.randint(3, (n, 1)) + torch.arange(width)
    sample = torch.arange(n)[:, None, None]
    moved = padded[sample, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
    return (moved, *rest)
