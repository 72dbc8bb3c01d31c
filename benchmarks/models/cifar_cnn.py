"""A CNN of 0.5 million parameters (2.1 MB) on CIFAR-10, trained with SGD and a full schedule.

It is a custom recipe: ``offbeat compare benchmarks/models/cifar_cnn.py --data DIR`` with the
directory of ``cifar10.npz``.
"""

import functools
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from offbeat_lab import Task, accuracy, recipe
from offbeat_lab.recipes.datasets import TensorData
from offbeat_lab.recipes.schedules import warmup_cosine


@functools.cache
def load(file: Path) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return training images and labels, and those for evaluation.

    The workers of a simulation share the tensors.
    """
    with np.load(file) as arrays:
        x, y, test_x, test_y = (
            torch.from_numpy(arrays[name]) for name in ("x_train", "y_train", "x_test", "y_test")
        )
    x, test_x = (
        ((images.float() / 255 - 0.473) / 0.251).permute(0, 3, 1, 2)  # in memory, channels are last
        for images in (x, test_x)
    )
    return x, y.long(), test_x, test_y.long()


def network(normalize=nn.Identity):
    """Return three convolutions and two linear layers.

    ``normalize`` creates the layer after each convolution from its number of channels.
    """
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), normalize(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), normalize(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), normalize(64), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(1024, 480), nn.ReLU(), nn.Linear(480, 10)),
    )


def task(model, data):
    """Return the task of training ``model`` with SGD on the files in ``data``."""
    x, y, test_x, test_y = load(data / "cifar10.npz")
    return Task(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.06, momentum=0.9),
        scheduler=warmup_cosine,
        dataset=TensorData(x, y),
        batch_size=16,
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        evaluate=accuracy(TensorData(test_x, test_y), {"accuracy": 1}, batch_size=100),
    )


@recipe(metric="accuracy", target=0.5, epochs=1.5)
def cifar_cnn(setup):
    """Train the network; the rate rises, then falls to nothing."""
    return task(network(), setup.data)
