"""MNIST, or any data set in its IDX format (Fashion-MNIST): a small CNN."""

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from offbeat.lab.recipes.base import Recipe, Setup, Task, accuracy, steps_for
from offbeat.lab.recipes.samples import TensorData, shared
from offbeat.lab.recipes.schedules import warmup_cosine

BATCH_SIZE, CLASSES = 64, 10
FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


def read_idx(path: Path) -> Tensor:
    """An IDX file of unsigned bytes, plain or gzipped, as a uint8 tensor of its own shape.

    Raises:
        ValueError: it is not an IDX file of bytes, or its length is not what its header says.
    """
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


def find(data: Path | None, name: str) -> Path:
    """The file ``name`` or ``name.gz`` in directory ``data``.

    Raises:
        FileNotFoundError: no directory, or no such file in it; the message says what was sought.
    """
    if data is None:
        raise FileNotFoundError(
            f"the mnist recipe needs --data DIR with {', '.join(FILES)} (each may end in .gz)"
        )
    for path in (data / name, data / f"{name}.gz"):
        if path.is_file():
            return path
    problem = "which does not exist" if not data.is_dir() else "but it is not there"
    raise FileNotFoundError(f"looked for {name} or {name}.gz in {data}, {problem}")


def read_split(data: Path | None, images: str, labels: str) -> tuple[Tensor, Tensor]:
    """Images (n×28×28 bytes) and their labels (n bytes, 0 to 9) from two files.

    Raises:
        FileNotFoundError: see ``find``.
        ValueError: a file is no IDX file, or the two do not fit together; naming the files.
    """
    paths = find(data, images), find(data, labels)
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
    """Two strided convolutions and two linear layers: 207,178 parameters, 0.8 MB."""
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


@shared
def load(data: Path | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images (n×1×28×28, normalized) and labels, test images and labels."""
    (train_x, train_y), (test_x, test_y) = (
        read_split(data, *files) for files in (FILES[:2], FILES[2:])
    )
    train, test = ((x[:, None].float() / 255 - 0.1307) / 0.3081 for x in (train_x, test_x))
    return train, train_y.long(), test, test_y.long()


def build(setup: Setup) -> Task:
    """The task, from the four IDX files in ``setup.data``."""
    train_x, train_y, test_x, test_y = load(setup.data)
    torch.manual_seed(setup.seed)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    steps = steps_for(setup, len(train_x), BATCH_SIZE)
    return Task(
        model=model,
        optimizer=optimizer,
        scheduler=warmup_cosine(optimizer, steps),
        dataset=TensorData(train_x, train_y),
        batch_size=BATCH_SIZE,
        steps=steps,
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        evaluate=accuracy(TensorData(test_x, test_y), {"test accuracy": 1}),
    )


RECIPE = Recipe(
    name="mnist:cnn",
    description="small CNN on MNIST or Fashion-MNIST in IDX files",
    metric="test accuracy",
    higher_is_better=True,
    target=0.98,
    epochs=2,
    build=build,
    needs_data="the four IDX files, plain or .gz",
)
