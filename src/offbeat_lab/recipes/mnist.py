"""Recipe ``mnist:cnn``: a small CNN on MNIST.

The recipe accepts other data sets with the same file names and shapes, such as Fashion-MNIST. The
files are in the IDX format: a header with the shape, then the bytes.
"""

import gzip
import math
import struct
import zlib
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from offbeat_lab.recipes.base import Recipe, Setup, Task
from offbeat_lab.recipes.classification import classification_task
from offbeat_lab.recipes.datasets import TensorData
from offbeat_lab.recipes.files import find_file, require_directory

CLASSES = 10
FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


def read_idx(path: Path) -> Tensor:
    """Read an IDX file of unsigned bytes into a uint8 tensor. The file may be gzipped."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is not a gzip file: {error}") from None
    if len(data) < 4 or data[:3] != b"\0\0\x08":
        raise ValueError(f"{path} is not an IDX file of unsigned bytes")
    dimensions = data[3]
    header = 4 + 4 * dimensions
    if len(data) < header:
        raise ValueError(f"{path} ends inside its header")
    shape = struct.unpack(f">{dimensions}I", data[4:header])
    if len(data) - header != math.prod(shape):
        raise ValueError(
            f"{path} says {' x '.join(map(str, shape))} but holds {len(data) - header} bytes"
        )
    return torch.from_numpy(np.frombuffer(data, np.uint8, offset=header).copy()).view(shape)


def read_split(folder: Path, images: str, labels: str) -> tuple[Tensor, Tensor]:
    """Read images (n×28×28 bytes) and their labels (n bytes, 0 to 9) from two files."""
    paths = [find_file(folder, (name, f"{name}.gz")) for name in (images, labels)]
    x, y = (read_idx(path) for path in paths)
    if x.dim() != 3 or x.shape[1:] != (28, 28) or not len(x):
        raise ValueError(f"{paths[0]} must hold images of 28 x 28, but it says {_shape(x)}")
    if y.shape != x.shape[:1]:
        raise ValueError(f"{paths[1]} must hold {len(x)} labels, but it says {_shape(y)}")
    if y.max() >= CLASSES:
        raise ValueError(f"{paths[1]} must hold labels from 0 to 9, but one is {y.max()}")
    return x, y


def _shape(tensor: Tensor) -> str:
    return " x ".join(map(str, tensor.shape)) or "nothing"


def make_model() -> nn.Module:
    """Return a CNN of two convolutions and two linear layers: 207,178 parameters, 0.8 MB."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 49, 128),
        nn.ReLU(),
        nn.Linear(128, CLASSES),
    )


@lru_cache(maxsize=1)  # simulated workers, which are threads of one process, share the tensors
def load(data: Path | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return training images (n×1×28×28, normalized), their labels, test images, their labels."""
    folder = require_directory(data, "mnist", f"{', '.join(FILES)} (each may end in .gz)")
    (train_x, train_y), (test_x, test_y) = (
        read_split(folder, *files) for files in (FILES[:2], FILES[2:])
    )
    train, test = ((x[:, None].float() / 255 - 0.1307) / 0.3081 for x in (train_x, test_x))
    return train, train_y.long(), test, test_y.long()


def build(setup: Setup) -> Task:
    """Build the task from the four IDX files in ``setup.data``."""
    train_x, train_y, test_x, test_y = load(setup.data)
    return classification_task(
        setup,
        make_model,
        TensorData(train_x, train_y),
        TensorData(test_x, test_y),
        batch_size=64,
        metrics={"test accuracy": 1},
        lr=0.05,
    )


RECIPE = Recipe(
    name="mnist:cnn",
    description="small CNN on MNIST or Fashion-MNIST in IDX files",
    metric="test accuracy",
    higher_is_better=True,
    target=0.98,
    epochs=2,
    build=build,
    chance=0.1,
    needs_data="the four IDX files, plain or .gz",
)
