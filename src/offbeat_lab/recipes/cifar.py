"""Recipe ``cifar10:resnet101``: ResNet-101 on CIFAR-10, with the settings of the SelSync paper.

"The paper" is Tyagi & Swany, arXiv 2307.07950. The comments name the exceptions.
"""

import math
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from offbeat_lab.recipes.base import Recipe, Setup, Task
from offbeat_lab.recipes.classification import classification_task
from offbeat_lab.recipes.datasets import Batch, TensorData, shifted
from offbeat_lab.recipes.files import find_file, require_directory
from offbeat_lab.recipes.models.resnet import resnet101
from offbeat_lab.recipes.schedules import decay_at

NAME, FILE, CLASSES = "cifar10:resnet101", "cifar10.npz", 10
BATCH_SIZE = 32
MEAN = (0.4914, 0.4822, 0.4465)
DEVIATION = (0.2470, 0.2435, 0.2616)
Split = tuple[Tensor, Tensor]
"""Images (n×3×32×32, uint8) and labels (n, int64)."""


def read_archive(path: Path) -> tuple[Split, Split]:
    """Return the training and the test split of an ``.npz`` file.

    Its arrays have the names and shapes of Keras: x_train and x_test are n×32×32×3 bytes, y_train
    and y_test are n or n×1 integers.
    """
    with path.open("rb") as opened:
        try:
            with np.load(opened, allow_pickle=False) as file:
                return _read_split(file, "train"), _read_split(file, "test")
        except Exception as error:  # a damaged archive can raise any exception
            text = " ".join(str(error).split())
            names = "x_train, y_train, x_test, y_test"
            raise ValueError(f"{path} is not an .npz file with {names}: {text}") from None


def _read_split(file: Any, split: str) -> Split:
    images, labels = file[f"x_{split}"], file[f"y_{split}"]
    if images.dtype != np.uint8 or images.shape[1:] != (32, 32, 3):
        raise ValueError(f"x_{split} must be bytes of shape n x 32 x 32 x 3, got {images.shape}")
    if labels.dtype.kind not in "iu" or math.prod(labels.shape) != len(images) or not len(labels):
        raise ValueError(f"y_{split} must be {len(images)} integers, and at least one")
    if labels.min() < 0 or labels.max() >= CLASSES:
        raise ValueError(f"y_{split} must hold labels from 0 to {CLASSES - 1}")
    planes = torch.from_numpy(images.transpose(0, 3, 1, 2).copy(order="C"))
    return planes, torch.from_numpy(labels.reshape(-1).astype(np.int64))


@lru_cache(maxsize=1)  # simulated workers, which are threads of one process, share the tensors
def load(data: Path | None) -> tuple[Split, Split]:
    """Return the training and the test split. ``data`` is the ``.npz`` file or its directory."""
    data = require_directory(data, NAME, FILE)
    return read_archive(data if data.is_file() else find_file(data, [FILE]))


def normalized(images: Tensor) -> Tensor:
    """Scale byte images (n×3×32×32) to about mean 0 and deviation 1 per channel."""
    mean, deviation = (torch.tensor(values)[:, None, None] for values in (MEAN, DEVIATION))
    return (images.float() / 255 - mean) / deviation


def flipped(images: Tensor) -> Tensor:
    """Mirror each image left to right with probability ½, drawn by torch's global generator."""
    chosen = torch.rand(len(images), 1, 1, 1) < 0.5
    return torch.where(chosen, images.flip(3), images)


def splits(data: Path | None) -> tuple[TensorData, TensorData]:
    """Return the training and the test set, normalized.

    Training images are mirrored and shifted by up to 4 pixels at random whenever they are read.
    """
    train, test = load(data)

    def plain(batch: Batch) -> Batch:
        return normalized(batch[0]), *batch[1:]

    def augment(batch: Batch) -> Batch:
        return plain((flipped(shifted(batch[0], 4)), *batch[1:]))

    return TensorData(*train, change=augment), TensorData(*test, change=plain)


def build(setup: Setup) -> Task:
    """Build the task: SGD, whose rate is divided by ten after the epochs 110 and 150."""
    train, test = splits(setup.data)

    def decay(optimizer: Optimizer, steps: int) -> LRScheduler:
        samples = [epoch * len(train) for epoch in (110, 150)]
        return decay_at(optimizer, samples, 0.1, samples_per_step=BATCH_SIZE * setup.workers)

    return classification_task(
        setup,
        lambda: resnet101(CLASSES),
        train,
        test,
        batch_size=BATCH_SIZE,
        metrics={"top-1 accuracy": 1, "top-5 accuracy": 5},
        test_batch_size=500,
        lr=0.1,
        weight_decay=4e-4,
        schedule=decay,
    )


# The target is not the paper's. The paper reports 98.5 % for BSP. This cannot be the top-1 accuracy
# on CIFAR-10, because this network reaches 93 to 95 % when trained from scratch.
RECIPE = Recipe(
    name=NAME,
    description="ResNet-101 on CIFAR-10, as in the SelSync paper",
    metric="top-1 accuracy",
    higher_is_better=True,
    target=0.93,
    epochs=234,  # 22,800 iterations of 16 workers, as for BSP in the paper's Table I
    build=build,
    needs_data=FILE,
    chance=0.1,
)
