"""A CNN of 2.1 million parameters on CIFAR-10, at a constant rate: what it takes to send it counts.

As a recipe of one's own: ``offbeat compare benchmarks/models/cifar_wide.py --data DIR``, of the
directory with ``cifar10.npz``.
"""

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from offbeat.lab import Task, accuracy, recipe


def network():
    """Three convolutions and two linear layers."""
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(2048, 960), nn.ReLU(), nn.Linear(960, 10)),
    )


def task(setup, scheduler=None):
    """``network`` on CIFAR-10."""
    with np.load(setup.data / "cifar10.npz") as file:
        x, y, test_x, test_y = (
            torch.from_numpy(file[name]) for name in ("x_train", "y_train", "x_test", "y_test")
        )
    x, test_x = (
        (images.permute(0, 3, 1, 2).float() / 255 - 0.473) / 0.251 for images in (x, test_x)
    )
    model = network()
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
    """The same rate throughout."""
    return task(setup)
