"""Data sets that return whole batches, and functions on batches."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate

Batch = tuple[Tensor, ...]


class Samples(Dataset[Batch], ABC):
    """Map-style data set of tuples of tensors that also accepts a list of indices.

    Attributes:
        labels: Label of every sample (n, integers), available without reading a sample. None if
            the samples have no single label.
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
    """Samples in memory. One indexing operation per tensor reads a whole batch.

    Args:
        tensors: Tensors whose first dimension is the sample. If there are several and the last one
            is one-dimensional, it holds the labels.
        change: Transformation of every batch, such as augmentation; None for none.
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
    """Any map-style data set as ``Samples``, stacked by torch's ``default_collate``."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self._dataset: Any = dataset
        self.labels = labels_of(dataset)

    def __len__(self) -> int:
        return len(self._dataset)

    def batch(self, indices: list[int]) -> Batch:
        """Return the collated items at ``indices``. A list of tensors becomes a tuple."""
        fetch = getattr(self._dataset, "__getitems__", None)
        items = fetch(indices) if fetch else [self._dataset[index] for index in indices]
        batch: Any = default_collate(items)
        return tuple(batch) if isinstance(batch, list) else batch


def labels_of(dataset: Any) -> Tensor | None:
    """Return the labels of a data set without reading its samples, or None if it has none.

    Supports torch's ``TensorDataset`` and ``Subset``, and any data set with an attribute ``labels``
    or ``targets``, as torchvision's have.
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
    """Return ``batch`` with all tensors on ``device``. Tuples, lists and mappings may nest."""
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        return tuple(to_device(value, device) for value in batch)
    return batch


def load_batches(dataset: Samples, batches: list[list[int]], readers: int = 0) -> DataLoader[Batch]:
    """Return a loader of the given batches in order. Does not change the global random state.

    Args:
        dataset: Data set to read.
        batches: Sample indices of each batch.
        readers: Number of processes that read ahead; 0 reads on the calling thread.
    """
    return DataLoader(
        dataset,
        batch_size=None,
        sampler=batches,
        num_workers=readers,
        generator=torch.Generator(),  # without one, each pass draws from torch's global generator
    )


def shifted(images: Tensor, reach: int) -> Tensor:
    """Shift each image (n×C×H×W) by up to ``reach`` pixels in both directions.

    Torch's global generator draws the shifts. Zeros fill the border.
    """
    n, _, height, width = images.shape
    padded = nn.functional.pad(images, (reach, reach, reach, reach))
    rows = torch.randint(2 * reach + 1, (n, 1)) + torch.arange(height)
    columns = torch.randint(2 * reach + 1, (n, 1)) + torch.arange(width)
    sample = torch.arange(n)[:, None, None]
    return padded[sample, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def shift_images(batch: Batch) -> Batch:
    """Shift the images of a batch by −1, 0 or 1 pixels in both directions."""
    images, *rest = batch
    return (shifted(images, 1), *rest)
