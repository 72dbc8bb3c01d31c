"""What a recipe is: a model, data, an optimizer, a schedule, a metric and a target."""

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
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
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate

from offbeat.arguments import require_integer

Batch = tuple[Tensor, ...]
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


class Samples(Dataset[Batch], ABC):
    """Samples that are tuples of tensors, read one by one or as a batch."""

    labels: Tensor | None = None
    """The label of every sample (n, integers), known without reading one; None: there are none."""

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
        tensors: Tensors whose first dimension is the sample. If the last of several has one number
            a sample, those are the labels.
        change: Applied to every batch, for augmentation: (tensors of the batch) → the same.
    """

    def __init__(
        self,
        *tensors: Tensor,
        change: Callable[[Batch], Batch] | None = None,
    ) -> None:
        self.tensors, self._change = tensors, change
        self.labels = tensors[-1] if len(tensors) > 1 and tensors[-1].dim() == 1 else None

    def __len__(self) -> int:
        return len(self.tensors[0])

    def batch(self, indices: list[int]) -> Batch:
        """The samples of ``indices``, changed."""
        chosen = tuple(t[indices] for t in self.tensors)
        return chosen if self._change is None else self._change(chosen)


class Collated(Samples):
    """Any map-style dataset as samples: items are stacked by torch's ``default_collate``.

    Args:
        dataset: Has a length and gives an item for an index.
    """

    def __init__(self, dataset: Dataset[Any]) -> None:
        self._dataset: Any = dataset
        self.labels = labels_of(dataset)

    def __len__(self) -> int:
        return len(self._dataset)

    def batch(self, indices: list[int]) -> Batch:
        """The items of ``indices``; a list of tensors becomes a tuple."""
        fetch = getattr(self._dataset, "__getitems__", None)
        items = fetch(indices) if fetch else [self._dataset[index] for index in indices]
        batch: Any = default_collate(items)
        return tuple(batch) if isinstance(batch, list) else batch


def labels_of(dataset: Any) -> Tensor | None:
    """The labels of torch's ``TensorDataset`` and ``Subset`` and of torchvision's data sets."""
    if isinstance(dataset, Subset):
        labels = labels_of(dataset.dataset)
        return None if labels is None else labels[torch.as_tensor(dataset.indices)]
    if isinstance(dataset, TensorDataset):
        last = dataset.tensors[-1]
        return last if len(dataset.tensors) > 1 and last.dim() == 1 else None
    found = getattr(dataset, "labels", None)
    found = getattr(dataset, "targets", None) if found is None else found
    return None if found is None else torch.as_tensor(found)


def as_samples(dataset: Dataset[Any]) -> Samples:
    """The dataset, if it gives batches itself, else ``Collated``."""
    return dataset if isinstance(dataset, Samples) else Collated(dataset)


def to_device(batch: Any, device: torch.device) -> Any:
    """A batch of tensors, in tuples and dictionaries, on ``device``."""
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: to_device(one, device) for key, one in batch.items()}
    if isinstance(batch, tuple | list):
        return tuple(to_device(one, device) for one in batch)
    return batch


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


def in_order(dataset: Samples, batches: list[list[int]], readers: int = 0) -> DataLoader[Batch]:
    """Those batches of ``dataset``, in order; draws nothing from the global random state."""
    return DataLoader(
        dataset,
        batch_size=None,
        sampler=batches,
        num_workers=readers,
        generator=torch.Generator(),  # else each pass takes a number from torch's own generator
    )


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
