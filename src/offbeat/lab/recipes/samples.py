"""Samples of a recipe, read a batch at a time, and what is done with a batch."""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate

Batch = tuple[Tensor, ...]
P = ParamSpec("P")
T = TypeVar("T")


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


def in_order(dataset: Samples, batches: list[list[int]], readers: int = 0) -> DataLoader[Batch]:
    """Those batches of ``dataset``, in order; draws nothing from the global random state."""
    return DataLoader(
        dataset,
        batch_size=None,
        sampler=batches,
        num_workers=readers,
        generator=torch.Generator(),  # else each pass takes a number from torch's own generator
    )


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


def shared(load: Callable[P, T]) -> Callable[P, T]:
    """``load``, whose tensors are in memory once, however many workers of a process read them.

    It keeps nothing itself: what no task holds any more is freed, and read anew if asked for again.

    Args:
        load: Gives tensors, and plain values, in tuples of any depth. Nobody may write to them. The
            same for the same arguments.
    """
    known: dict[Any, Any] = {}

    @wraps(load)
    def loaded(*args: P.args, **kwargs: P.kwargs) -> T:
        asked = (args, tuple(sorted(kwargs.items())))
        try:
            found: T = _held(known[asked])
        except (KeyError, ReferenceError):
            found = load(*args, **kwargs)
            known[asked] = _weakly(found)
        return found

    return loaded


def _weakly(value: Any) -> Any:
    """The same with weak references to the tensors."""
    if isinstance(value, tuple):
        return tuple(map(_weakly, value))
    return weakref.ref(value) if isinstance(value, Tensor) else value


def _held(value: Any) -> Any:
    """What ``_weakly`` was given.

    Raises:
        ReferenceError: a tensor of it is there no more.
    """
    if isinstance(value, tuple):
        return tuple(map(_held, value))
    if not isinstance(value, weakref.ref):
        return value
    tensor = value()
    if tensor is None:
        raise ReferenceError
    return tensor
