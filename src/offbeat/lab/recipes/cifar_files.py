"""CIFAR-10 and CIFAR-100 from their official files, read without running what is in them."""

import math
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offbeat.lab.recipes.samples import shared

Split = tuple[Tensor, Tensor]  # images n×3×32×32 uint8, labels n int64


@dataclass(frozen=True)
class Layout:
    """Where a data set is.

    Attributes:
        folder: Directory of the official archive.
        archive: One file with all of it, in NumPy's format.
        train: Files of the training split.
        test: File of the test split.
        labels: Key of the labels.
        classes: Number of classes.
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
    """What stands for a NumPy array while a file is read: its shape and bytes, unchecked."""

    state: tuple[Any, ...] = ()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.state = state

    def image_bytes(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The array.

        Raises:
            ValueError: it is not one of bytes, n×3072.
        """
        _, shape, kind, fortran, data = self.state
        n, width = shape
        if not isinstance(kind, _Kind) or kind.name not in (b"u1", "u1") or width != 3072:
            raise ValueError("the images are not n x 3072 bytes")
        if not isinstance(data, bytes) or len(data) != n * width:
            raise ValueError(f"{n} x {width} bytes of images are announced, {len(data)} are there")
        flat = np.frombuffer(data, np.uint8)
        return flat.reshape((n, width), order="F" if fortran else "C")


class _Kind:
    """What stands for a NumPy dtype while a file is read."""

    def __init__(self, name: object, *_: object) -> None:
        self.name = name

    def __setstate__(self, state: object) -> None:
        pass


def _array(*_: object) -> _Array:
    return _Array()


class _Reader(pickle.Unpickler):
    """An unpickler of plain values and stand-ins for NumPy arrays: nothing of a file's own runs."""

    def find_class(self, module: str, name: str) -> Any:
        """What the official files name; all else is refused."""
        if name == "_reconstruct" and module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            return _array
        if module == "numpy" and name in ("ndarray", "dtype"):
            return {"ndarray": _Array, "dtype": _Kind}[name]
        raise pickle.UnpicklingError(f"it names {module}.{name}, as no CIFAR file does")


def read_batch(path: Path, labels: bytes, classes: int) -> Split:
    """One file of the official "python version": a pickled dictionary of images and labels.

    Args:
        path: The file.
        labels: Key of the labels, ``b"labels"`` or ``b"fine_labels"``.
        classes: Labels are in [0, classes).

    Returns:
        Images (n×3×32×32, uint8) and labels (n, int64).

    Raises:
        ValueError: it is not such a file, or names a class or function that no CIFAR file does.
    """
    try:
        with path.open("rb") as file:
            content = _Reader(file, encoding="bytes").load()
        if not isinstance(content, dict) or not isinstance(content.get(b"data"), _Array):
            raise ValueError("it holds no dictionary with images under b'data'")
        images = content[b"data"].image_bytes()
        values = content.get(labels)
        if not isinstance(values, list) or not all(type(value) is int for value in values):
            raise ValueError(f"it holds no list of numbers under {labels!r}")
    except OSError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise ValueError(f"{path} is not a CIFAR file: {' '.join(str(error).split())}") from None
    return _checked(path, images.reshape(-1, 3, 32, 32), np.array(values, np.int64), classes)


def read_archive(path: Path, classes: int) -> tuple[Split, Split]:
    """An ``.npz`` file with ``x_train``, ``y_train``, ``x_test`` and ``y_test``.

    Images are n×32×32×3 bytes, labels n or n×1 integers, the names and shapes that Keras gives.

    Returns:
        Training and test split, each images (n×3×32×32, uint8) and labels (n, int64).

    Raises:
        ValueError: it is not such a file.
    """
    with path.open("rb") as opened:
        try:
            with np.load(opened, allow_pickle=False) as file:
                found = {key: file[key] for key in ("x_train", "y_train", "x_test", "y_test")}
        except Exception as error:  # a damaged archive can raise anything
            text = " ".join(str(error).split())
            raise ValueError(
                f"{path} is not an .npz file with x_train, y_train, x_test, y_test: {text}"
            ) from None
    splits = []
    for split in ("train", "test"):
        images, labels = found[f"x_{split}"], found[f"y_{split}"]
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
    path: Path,
    images: np.ndarray[Any, np.dtype[np.uint8]],
    labels: np.ndarray[Any, np.dtype[np.int64]],
    classes: int,
) -> Split:
    if len(images) != len(labels):
        raise ValueError(f"{path} holds {len(images)} images and {len(labels)} labels")
    if len(labels) == 0 or labels.min() < 0 or labels.max() >= classes:
        raise ValueError(f"{path} must hold labels from 0 to {classes - 1}, and at least one")
    return torch.from_numpy(images.copy(order="C")), torch.from_numpy(labels)


@shared
def load(data: Path | None, layout: Layout, recipe: str) -> tuple[Split, Split]:
    """Training and test split of CIFAR-10 or CIFAR-100.

    Args:
        data: The official directory, its parent, one with the ``.npz`` file, or that file.
        layout: Which of the two.
        recipe: Who asks, for the message.

    Raises:
        FileNotFoundError: something is not there; the message says what was sought and where.
        ValueError: a file is not what its name says.
    """
    wanted = f"{layout.folder} or {layout.archive}"
    if data is None:
        raise FileNotFoundError(f"the {recipe} recipe needs --data DIR with {wanted}")
    if data.suffix == ".npz" and data.is_file():
        return read_archive(data, layout.classes)
    if data.name == layout.folder or (data / layout.test).is_file():
        return _load_folder(data, layout)
    if (data / layout.folder).is_dir():
        return _load_folder(data / layout.folder, layout)
    if (data / layout.archive).is_file():
        return read_archive(data / layout.archive, layout.classes)
    problem = "which does not exist" if not data.exists() else "but neither is there"
    raise FileNotFoundError(f"looked for {wanted} in {data}, {problem}")


def _load_folder(folder: Path, layout: Layout) -> tuple[Split, Split]:
    problem = "but it is not there" if folder.is_dir() else "which does not exist"
    for name in (*layout.train, layout.test):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"looked for {name} in {folder}, {problem}")
    parts = [read_batch(folder / name, layout.labels, layout.classes) for name in layout.train]
    train = torch.cat([images for images, _ in parts]), torch.cat([labels for _, labels in parts])
    return train, read_batch(folder / layout.test, layout.labels, layout.classes)
