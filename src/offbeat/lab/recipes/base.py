"""What a recipe is: a model, data, an optimizer, a schedule, a metric and a target."""

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler

Batch = tuple[Tensor, ...]
Evaluate = Callable[[nn.Module], dict[str, float]]


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
        dataset: The training split; the same sample for the same index, augmentation apart.
        batch_size: Samples a worker takes in a step.
        steps: Steps each worker takes in the whole run.
        loss: (model, batch on the model's device) → the loss to go back from.
        evaluate: model → metrics on the held-out split by name, the recipe's own among them. Leaves
            the model in training mode and the global random state as it was.
        clip_norm: The largest norm of a gradient; longer ones are cut. None: no clipping.
        readers: Processes that prepare batches beside a training process that uses a GPU. On a CPU
            they would take the model's cores, so there are none.
    """

    model: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler
    dataset: "Samples"
    batch_size: int
    steps: int
    loss: Callable[[nn.Module, Any], Tensor]
    evaluate: Evaluate
    clip_norm: float | None = None
    readers: int = 0


class Samples(Dataset[Batch], ABC):
    """Samples that are tuples of tensors, read one by one or as a batch."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def batch(self, indices: list[int]) -> Batch:
        """The samples of ``indices``, stacked along a first dimension."""

    def __getitem__(self, index: int | list[int]) -> Batch:
        """One sample, or the samples of a list of indices, stacked."""
        if isinstance(index, list):
            return self.batch(index)
        return tuple(t[0] for t in self.batch([index]))


class TensorData(Samples):
    """Samples held in memory; a whole batch is read by one indexing operation.

    Args:
        tensors: Tensors whose first dimension is the sample.
        change: Applied to every batch, for augmentation: (tensors of the batch) → the same.
    """

    def __init__(
        self,
        *tensors: Tensor,
        change: Callable[[Batch], Batch] | None = None,
    ) -> None:
        self.tensors, self._change = tensors, change

    def __len__(self) -> int:
        return len(self.tensors[0])

    def batch(self, indices: list[int]) -> Batch:
        """The samples of ``indices``, changed."""
        chosen = tuple(t[indices] for t in self.tensors)
        return chosen if self._change is None else self._change(chosen)


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


def decay_at(
    optimizer: Optimizer, milestones: Sequence[float], factor: float, *, samples_a_step: int
) -> LRScheduler:
    """Multiply the learning rate by ``factor`` at each number of samples in ``milestones``.

    Samples are those seen by all workers: scheduler step t is t · ``samples_a_step``, so N workers
    decay after as many samples as one does, in N times fewer steps.

    Args:
        optimizer: The optimizer.
        milestones: Rising numbers of samples.
        factor: By what the rate is multiplied.
        samples_a_step: Batch size × workers.
    """
    return LambdaLR(optimizer, lambda t: factor ** bisect_right(milestones, t * samples_a_step))


def decay_every(
    optimizer: Optimizer, samples: int, factor: float, *, samples_a_step: int
) -> LRScheduler:
    """Multiply the learning rate by ``factor`` whenever all workers have seen ``samples`` more."""
    return LambdaLR(optimizer, lambda t: factor ** (t * samples_a_step // samples))


def device_of(model: nn.Module) -> torch.device:
    """Where the model's parameters are."""
    return next(model.parameters()).device


def in_order(dataset: Samples, batch_size: int, readers: int = 0) -> DataLoader[Batch]:
    """All batches of ``dataset`` in order; draws nothing from the global random state."""
    sampler = BatchSampler(SequentialSampler(dataset), batch_size, drop_last=False)
    return DataLoader(
        dataset,
        batch_size=None,
        sampler=sampler,
        num_workers=readers,
        generator=torch.Generator(),  # else each pass takes a number from torch's own generator
    )


def accuracy(
    dataset: Samples, names: dict[str, int], *, batch_size: int = 1000, readers: int = 0
) -> Evaluate:
    """An ``evaluate`` for classifiers: how often the right label is among the k likeliest.

    Args:
        dataset: Pairs of an input and its label.
        names: The name of each metric and its k; a k above the number of classes counts as that.
        batch_size: Inputs classified at once.
        readers: See ``Task``.

    Returns:
        model → shares in [0, 1] by name.
    """

    def evaluate(model: nn.Module) -> dict[str, float]:
        device = device_of(model)
        model.eval()
        right = dict.fromkeys(names, 0)
        with torch.no_grad():
            for inputs, labels in in_order(
                dataset, batch_size, readers if device.type == "cuda" else 0
            ):
                logits = model(inputs.to(device))
                likeliest = logits.topk(min(max(names.values()), logits.shape[1])).indices
                hits = likeliest == labels.to(device)[:, None]
                for name, k in names.items():
                    right[name] += int(hits[:, :k].sum())
        model.train()
        return {name: count / len(dataset) for name, count in right.items()}

    return evaluate


def shift_images(batch: Batch) -> Batch:
    """Move each image by −1, 0 or 1 pixels in both directions, drawn from torch's generator."""
    images, *rest = batch
    return (shifted(images, 1), *rest)


def shifted(images: Tensor, reach: int) -> Tensor:
    """Images (n×C×H×W) moved by up to ``reach`` pixels each way, zeros coming in at the border."""
    n, _, height, width = images.shape
    padded = nn.functional.pad(images, (reach, reach, reach, reach))
    rows = torch.randint(2 * reach + 1, (n, 1)) + torch.arange(height)
    columns = torch.randint(2 * reach + 1, (n, 1)) + torch.arange(width)
    sample = torch.arange(n)[:, None, None]
    return padded[sample, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
