"""A CNN of 2.1 million parameters on CIFAR-10, at a constant rate.

The model is large for its step time, so that communication counts. It is a custom recipe:
``offbeat compare benchmarks/models/cifar_wide.py --data DIR`` with the directory of
``cifar10.npz``.
"""

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from offbeat.lab import Task, accuracy, recipe


def network(norm=False, hidden=960):
    """Return three convolutions, each with BatchNorm if ``norm``, and two linear layers."""

    def convolution(channels, more):
        between = [nn.BatchNorm2d(more)] if norm else []
        return nn.Conv2d(channels, more, 3, padding=1), *between, nn.ReLU(), nn.MaxPool2d(2)

    return nn.Sequential(
        *convolution(3, 32),
        *convolution(32, 64),
        *convolution(64, 128),
        *(nn.Flatten(), nn.Linear(2048, hidden), nn.ReLU(), nn.Linear(hidden, 10)),
    )


def task(setup, scheduler=None, norm=False, hidden=960):
    """Return the task of training ``network`` on CIFAR-10."""
    with np.load(setup.data / "cifar10.npz") as file:
        x, y, test_x, test_y = (
            torch.from_numpy(file[name]) for name in ("x_train", "y_train", "x_test", "y_test")
        )
    x, test_x = (
        (images.permute(0, 3, 1, 2).float() / 255 - 0.473) / 0.251 for images in (x, test_x)
    )
    model = network(norm, hidden)
    return Task(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9),
        scheduler=scheduler,
        dataset=TensorDataset(x, y.long()),
        batch_size=32,
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        evaluate=accuracy(TensorDataset(test_x, test_y.long()), {"accuracy": 1}),
    )


@recipe(metric="accuracy", target=0.6, epochs=4)
def cifar_wide(setup):
    """Train at a constant rate."""
    return task(setup)
