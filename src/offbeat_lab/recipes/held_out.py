"""Evaluation of a model on held-out data, by one worker or divided among all workers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from offbeat_lab.recipes.datasets import Samples, as_samples, to_device

Share = dict[str, list[float]]
"""Results of one worker: name of a score → one sum of the score for each batch of the worker."""


@dataclass(frozen=True)
class HeldOut:
    """Held-out samples and scores, with which a model is evaluated.

    A *score* has one value per sample, such as the sample's loss. The metrics are computed from the
    mean of each score over all samples. With N workers, each evaluates every N-th batch
    (``share``), and ``combine`` adds up their results. To evaluate on one worker, call the object.

    Attributes:
        dataset: The samples.
        scores: Function (model in evaluation mode, batch on the model's device) → dictionary from
            score name to a tensor with one value per sample.
        batch_size: Maximum number of samples per batch. With N workers, a batch has at most
            ⌈samples/N⌉.
        metrics: Function from the means of the scores to the metrics, for example from the mean
            loss to the perplexity. Both are dictionaries by name. None: the means are the metrics.
    """

    dataset: Dataset[Any]
    scores: Callable[[nn.Module, Any], Mapping[str, Tensor]]
    batch_size: int = 500
    metrics: Callable[[dict[str, float]], dict[str, float]] | None = None

    @cached_property
    def samples(self) -> Samples:
        """The data set, with a method that reads a batch at once."""
        return as_samples(self.dataset)

    def batches(self, rank: int = 0, size: int = 1) -> list[list[int]]:
        """Return the sample indices of each batch of worker ``rank`` among ``size`` workers."""
        every = [*range(len(self.samples))]
        at_once = min(self.batch_size, -(-len(every) // size))
        return [every[i : i + at_once] for i in range(0, len(every), at_once)][rank::size]

    def share(self, model: nn.Module, rank: int = 0, size: int = 1) -> Share:
        """Evaluate all batches of worker ``rank`` among ``size`` workers.

        Training modes of the model's modules and torch's random state on the CPU do not change.
        """
        device = next(model.parameters()).device
        sums: Share = {}
        with evaluating(model), torch.no_grad(), torch.random.fork_rng(devices=[]):
            for indices in self.batches(rank, size):
                batch = to_device(self.samples.batch(indices), device)
                for name, values in self.scores(model, batch).items():
                    if values.shape != (len(indices),):
                        raise ValueError(
                            f"scores must return one value for each of the {len(indices)} samples "
                            f"of a batch, got {name!r} of shape {tuple(values.shape)}"
                        )
                    sums.setdefault(name, []).append(float(values.double().sum()))
        return sums

    def combine(self, shares: Sequence[Share]) -> dict[str, float]:
        """Return the metrics over all samples, from the shares of all workers in rank order.

        The sums are added in the order of the batches, so that the same batches give the same bits
        with any number of workers.
        """
        count = len(self.samples)
        means = {}
        for name in shares[0]:
            batches = chain.from_iterable(zip_longest(*(share.get(name, []) for share in shares)))
            means[name] = sum(value for value in batches if value is not None) / count
        return means if self.metrics is None else self.metrics(means)

    def __call__(self, model: nn.Module) -> dict[str, float]:
        """Return the metrics of ``model`` on all samples."""
        return self.combine([self.share(model)])


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put ``model`` into evaluation mode, and restore the mode of each module at the end."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def accuracy(dataset: Dataset[Any], names: dict[str, int], *, batch_size: int = 1000) -> HeldOut:
    """Return a ``HeldOut`` whose metrics are top-k accuracies, for ``Task.evaluate``.

    Args:
        dataset: Pairs of an input and its label.
        names: Metric name → k, such as ``{"top-5 accuracy": 5}``.
        batch_size: Maximum number of inputs per batch.
    """

    def hits(model: nn.Module, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
        inputs, labels = batch
        logits = model(inputs)
        likeliest = logits.topk(min(max(names.values()), logits.shape[1])).indices
        right = likeliest == labels[:, None]
        return {name: right[:, :k].any(1) for name, k in names.items()}

    return HeldOut(dataset, hits, batch_size)
