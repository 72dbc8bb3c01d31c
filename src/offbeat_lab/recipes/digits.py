"""Recipe ``digits``: a small CNN on the 8×8 images of handwritten digits in scikit-learn."""

from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from offbeat_lab.recipes.base import Recipe, Setup, Task
from offbeat_lab.recipes.classification import classification_task
from offbeat_lab.recipes.datasets import TensorData, shift_images


@cache  # simulated workers, which are threads of one process, share the tensors
def load() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return 1437 training images, their labels, 360 test images and their labels.

    Images are n×1×8×8, in [0, 1].
    """
    images, labels = _read()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    test, train = order[:360], order[360:]
    return images[train], labels[train], images[test], labels[test]


def _read() -> tuple[Tensor, Tensor]:
    """Return all 1797 images in [0, 1] and their labels."""
    package = find_spec("sklearn")
    if package is None or not package.submodule_search_locations:
        raise ImportError("the digits recipe needs scikit-learn: pip install 'offbeat[lab]'")
    # Read the file directly: importing scikit-learn takes about as long as importing torch. The
    # file has one line per image: 64 pixels from 0 to 16, and the label.
    file = Path(package.submodule_search_locations[0], "datasets", "data", "digits.csv.gz")
    lines = torch.from_numpy(np.loadtxt(file, delimiter=",", dtype=np.float32))
    return lines[:, :-1].reshape(-1, 1, 8, 8) / 16, lines[:, -1].to(torch.int64)


def make_model() -> nn.Module:
    """Return a CNN of two convolutions and two linear layers: 151,498 parameters, 0.6 MB."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 16, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def build(setup: Setup) -> Task:
    """Build the task. Training images are augmented by random shifts of up to one pixel."""
    train_x, train_y, test_x, test_y = load()
    return classification_task(
        setup,
        make_model,
        TensorData(train_x, train_y, change=shift_images),
        TensorData(test_x, test_y),
        batch_size=32,
        metrics={"test accuracy": 1},
        lr=0.05,
    )


RECIPE = Recipe(
    name="digits",
    description="small CNN on scikit-learn's 1797 handwritten digits",
    metric="test accuracy",
    higher_is_better=True,
    target=0.985,
    epochs=30,
    build=build,
    chance=0.1,
)
