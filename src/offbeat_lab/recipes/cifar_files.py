"""Reads CIFAR-10 and CIFAR-100 from their files.

The official files are pickles. Code that a pickle may contain is not executed.
"""

import math
import pickle
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offbeat_lab.recipes.files import find_file, not_found, require_directory

Split = tuple[Tensor, Tensor]
"""Images (n×3×32×32, uint8) and labels (n, int64)."""
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True)
class Layout:
    """Names of the files of a data set.

    ``folder`` contains the official files ``train`` and ``test``, which have the labels under the
    key ``labels``. A file ``archive`` in NumPy's ``.npz`` format can replace the directory.
    """

    folder: str
    archive: str
    train: tuple[str, ...]
    test: str
    labels: bytes
    classes: int


CIFAR10 = Layout(
    "cifar-10-batches-py",
    "cifar10.npz",
    tuple(f"data_batch_{number}" for number in range(1, 6)),
    "test_batch",
    b"labels",
    10,
)
CIFAR100 = Layout("cifar-100-python", "cifar100.npz", ("train",), "test", b"fine_labels", 100)


class _Array:
    """Replaces a NumPy array during unpickling. Stores the pickled state without a check."""

    state: tuple[Any, ...] = ()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.state = state

    def image_bytes(self) -> Bytes:
        """Return the pickled state as an array of n×3072 bytes. Raise if it is anything else."""
        _, shape, dtype, fortran, data = self.state
        n, width = shape
        if not isinstance(dtype, _DType) or dtype.name not in (b"u1", "u1") or width != 3072:
            raise ValueError("the images are not n x 3072 bytes")
        if not isinstance(data, bytes) or len(data) != n * width:
            raise ValueError(f"the header says {n} x {width} bytes of images, got {len(data)}")
        flat = np.frombuffer(data, np.uint8)
        return flat.reshape((n, width), order="F" if fortran else "C")


class _DType:
    """Replaces a NumPy dtype during unpickling."""

    def __init__(self, name: object, *_: object) -> None:
        self.name = name

    def __setstate__(self, state: object) -> None:
        pass


class _Unpickler(pickle.Unpickler):
    """Reads plain values and NumPy arrays, and never calls a function that the file names.

    ``_Array`` and ``_DType`` replace NumPy's classes. NumPy receives the pickled data only after
    ``_Array.image_bytes`` has checked it.
    """

    def find_class(self, module: str, name: str) -> Any:
        """Return the replacement of a name that the official files use. Raise for other names."""
        if name == "_reconstruct" and module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            return lambda *_: _Array()
        if module == "numpy" and name in ("ndarray", "dtype"):
            return {"ndarray": _Array, "dtype": _DType}[name]
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no CIFAR file does")


def read_batch(path: Path, labels: bytes, classes: int) -> Split:
    """Read a file of the official "python version": a pickled dictionary of images and labels.

    ``labels`` is the key of the labels, ``b"labels"`` or ``b"fine_labels"``. Labels are in
    [0, ``classes``).
    """
    try:
        with path.open("rb") as file:
            content = _Unpickler(file, encoding="bytes").load()
        if not isinstance(content, dict) or not isinstance(content.get(b"data"), _Array):
            raise ValueError("it holds no dictionary with images under b'data'")
        images = content[b"data"].image_bytes()
        values = content.get(labels)
        if not isinstance(values, list) or not all(type(value) is int for value in values):
            raise ValueError(f"it holds no list of numbers under {labels!r}")
    except OSError:
        raise
    except Exception as error:  # a damaged pickle can raise any exception
        raise ValueError(f"{path} is not a CIFAR file: {' '.join(str(error).split())}") from None
    return _checked(path, images.reshape(-1, 3, 32, 32), np.array(values, np.int64), classes)


def read_archive(path: Path, classes: int) -> tuple[Split, Split]:
    """Return the training and the test split of an ``.npz`` file.

    Its arrays have the names and shapes of Keras: x_train and x_test are n×32×32×3 bytes, y_train
    and y_test are n or n×1 integers.
    """
    with path.open("rb") as opened:
        try:
            with np.load(opened, allow_pickle=False) as file:
                arrays = {key: file[key] for key in ("x_train", "y_train", "x_test", "y_test")}
        except Exception as error:  # a damaged archive can raise any exception
            text = " ".join(str(error).split())
            raise ValueError(
                f"{path} is not an .npz file with x_train, y_train, x_test, y_test: {text}"
            ) from None
    splits = []
    for split in ("train", "test"):
        images, labels = arrays[f"x_{split}"], arrays[f"y_{split}"]
        if images.dtype != np.uint8 or images.shape[1:] != (32, 32, 3):
            raise ValueError(
                f"{path}: x_{split} must be bytes of shape n x 32 x 32 x 3, "
                f"got {images.dtype} of {images.shape}"
            )
        if labels.dtype.kind not in "iu" or math.prod(labels.shape) != len(images):
            raise ValueError(
                f"{path}: y_{split} must be {len(images)} integers, "
                f"got {labels.dtype} of {labels.shape}"
            )
        labels = labels.reshape(-1).astype(np.int64)
        splits.append(_checked(path, images.transpose(0, 3, 1, 2), labels, classes))
    return splits[0], splits[1]


def _checked(
    path: Path, images: Bytes, labels: np.ndarray[Any, np.dtype[np.int64]], classes: int
) -> Split:
    if len(images) != len(labels):
        raise ValueError(f"{path} holds {len(images)} images and {len(labels)} labels")
    if len(labels) == 0 or labels.min() < 0 or labels.max() >= classes:
        raise ValueError(f"{path} must hold labels from 0 to {classes - 1}, and at least one")
    return torch.from_numpy(images.copy(order="C")), torch.from_numpy(labels)


@lru_cache(maxsize=1)  # simulated workers, which are threads of one process, share the tensors
def load(data: Path | None, layout: Layout, recipe: str) -> tuple[Split, Split]:
    """Load the training and the test split of CIFAR-10 or CIFAR-100.

    ``data`` is the official directory, its parent, a directory with the ``.npz`` file, or this
    file.
    """
    wanted = f"{layout.folder} or {layout.archive}"
    data = require_directory(data, recipe, wanted)
    if data.suffix == ".npz" and data.is_file():
        return read_archive(data, layout.classes)
    if data.name == layout.folder or (data / layout.test).is_file():
        return _load_folder(data, layout)
    if (data / layout.folder).is_dir():
        return _load_folder(data / layout.folder, layout)
    if (data / layout.archive).is_file():
        return read_archive(data / layout.archive, layout.classes)
    raise not_found(wanted, data, several=True)


def _load_folder(folder: Path, layout: Layout) -> tuple[Split, Split]:
    paths = [find_file(folder, [name]) for name in (*layout.train, layout.test)]
    *train, test = (read_batch(path, layout.labels, layout.classes) for path in paths)
    images, labels = zip(*train, strict=True)
    return (torch.cat(images), torch.cat(labels)), test
