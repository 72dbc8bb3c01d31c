"""Data sets that can read a whole batch at once, and functions on batches."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

Batch = tuple[Tensor, ...]


class Samples(Dataset[Batch], ABC):
    """Map-style data set of tuples of tensors. Indexing with a list reads a whole batch.

    Attributes:
        labels: Labels of all samples. None: unknown, or there are none.
    """

    labels: Tensor | None = None

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def batch(self, indices: list[int]) -> Batch:
        """Return the samples at ``indices``, stacked along a new first dimension."""

    def __getitem__(self, index: int | list[int]) -> Batch:
        """Return one sample, or the batch for a list of indices."""
        if isinstance(index, list):
            return self.batch(index)
        return tuple(t[0] for t in self.batch([index]))


class TensorData(Samples):
    """Samples in memory.

    Args:
        tensors: Tensors whose first dimension counts samples. If there are several and the last one
            is one-dimensional, it contains the labels.
        change: Function that transforms each batch when it is read, for example for augmentation.
    """

    def __init__(self, *tensors: Tensor, change: Callable[[Batch], Batch] | None = None) -> None:
        self.tensors, self._change = tensors, change
        self.labels = tensors[-1] if len(tensors) > 1 and tensors[-1].dim() == 1 else None

    def __len__(self) -> int:
        return len(self.tensors[0])

    def batch(self, indices: list[int]) -> Batch:
        """Return the transformed samples at ``indices``."""
        chosen = tuple(t[indices] for t in self.tensors)
        return chosen if self._change is None else self._change(chosen)


class Collated(Samples):
    """Wraps any map-style data set. torch's ``default_collate`` makes a batch from samples."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self._dataset: Any = dataset
        self.labels = labels_of(dataset)

    def __len__(self) -> int:
        return len(self._dataset)

    def batch(self, indices: list[int]) -> Batch:
        """Return the batch at ``indices``. A list from ``default_collate`` becomes a tuple."""
        fetch = getattr(self._dataset, "__getitems__", None)
        items = fetch(indices) if fetch else [self._dataset[index] for index in indices]
        batch: Any = default_collate(items)
        return tuple(batch) if isinstance(batch, list) else batch


def labels_of(dataset: Any) -> Tensor | None:
    """Return the labels of a data set without reading its samples, or None if they are not found.

    Looks at the attributes ``labels`` and ``targets``, which many data sets of torchvision have.
    The labels of a ``TensorDataset`` are its last tensor, if there are several and the last one is
    one-dimensional. A ``Subset`` has the labels of its samples.
    """
    if isinstance(dataset, Subset):
        labels = labels_of(dataset.dataset)
        return None if labels is None else labels[torch.as_tensor(dataset.indices)]
    if isinstance(dataset, TensorDataset):
        last = dataset.tensors[-1]
        return last if len(dataset.tensors) > 1 and last.dim() == 1 else None
    labels = getattr(dataset, "labels", None)
    labels = getattr(dataset, "targets", None) if labels is None else labels
    return None if labels is None else torch.as_tensor(labels)


def as_samples(dataset: Dataset[Any]) -> Samples:
    """Return ``dataset`` itself if it is a ``Samples``, else wrap it in ``Collated``."""
    return dataset if isinstance(dataset, Samples) else Collated(dataset)


def to_device(batch: Any, device: torch.device) -> Any:
    """Return a nested batch with its tensors on ``device``. Lists become tuples."""
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        return tuple(to_device(value, device) for value in batch)
    return batch


def shifted(images: Tensor, reach: int) -> Tensor:
    """Shift each image (n×C×H×W) at random, by up to ``reach`` pixels in each dimension.

    Torch's global generator draws the shifts. Zeros fill the border.
    """
    n, _, height, width = images.shape
    padded = nn.functional.pad(images, (reach, reach, reach, reach))
    rows = torch.randint(2 * reach + 1, (n, 1)) + torch.arange(height)
    columns = torch.randint(2 * reach + 1, (n, 1)) + torch.arange(width)
    sample = torch.arange(n)[:, None, None]
    return padded[sample, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def shift_images(batch: Batch) -> Batch:
    """Shift each image of a batch at random, by −1, 0 or 1 pixels in each dimension."""
    images, *rest = batch
    return (shifted(images, 1), *rest)
