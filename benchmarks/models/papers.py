"""Small tasks for the papers' figures, on CIFAR-10, MNIST and digits, all or few of their images.

The directory of the data holds ``cifar10.npz``, or MNIST's four files.
"""

from dataclasses import replace
from functools import cache

import cifar_cnn
import torch
from torch import nn

from offbeat_lab import Task, recipe
from offbeat_lab.recipes import digits, mnist
from offbeat_lab.recipes.classification import classification_task
from offbeat_lab.recipes.datasets import TensorData, shift_images
from offbeat_lab.recipes.held_out import HeldOut
from offbeat_lab.recipes.schedules import warmup_cosine

FEW = 1600
FEW_DIGITS = 160


@cache  # shared by all workers and runs of a process
def load(data):
    """Return images (channels first) and labels of both splits."""
    x, y, test_x, test_y = cifar_cnn.load(data / "cifar10.npz")
    return x.contiguous(), y, test_x.contiguous(), test_y


def accuracy_and_loss(dataset, name="accuracy"):
    """Return an evaluation with the accuracy, under this name, and the mean cross-entropy."""

    def scores(model, batch):
        logits = model(batch[0])
        loss = nn.functional.cross_entropy(logits, batch[1], reduction="none")
        return {name: logits.argmax(1) == batch[1], "loss": loss}

    return HeldOut(dataset, scores, batch_size=1000)


def strided(setup, *, rate=0.02, scheduler=None, images=None):
    """Return a task: two strided convolutions and two linear layers, 137,706 parameters."""
    x, y, test_x, test_y = load(setup.data)
    model = nn.Sequential(
        *(nn.Conv2d(3, 16, 5, stride=2, padding=2), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(2048, 64), nn.ReLU(), nn.Linear(64, 10)),
    )
    return Task(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=4e-4),
        scheduler=scheduler,
        dataset=TensorData(x[:images], y[:images]),
        batch_size=32,
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        evaluate=accuracy_and_loss(TensorData(test_x, test_y)),
    )


@recipe(metric="accuracy", target=0.55, epochs=8)
def cifar(setup):
    """Train at a constant rate."""
    return strided(setup, rate=0.05)


@recipe(metric="accuracy", target=0.55, epochs=8)
def cifar_decay(setup):
    """Train with a warm-up over a tenth of the run, then half a cosine to 0."""
    return strided(setup, scheduler=warmup_cosine)


@recipe(metric="accuracy", target=0.4, epochs=60)
def cifar_few(setup):
    """Train on the first 1,600 images only: few data, many passes."""
    return strided(setup, images=FEW)


@recipe(metric="test accuracy", target=0.9, epochs=150)
def digits_few(setup):
    """Train the recipe ``digits`` on the first 160 images, 20 for each of 8 workers."""
    x, y, test_x, test_y = digits.load()
    task = classification_task(
        setup,
        digits.make_model,
        TensorData(x[:FEW_DIGITS], y[:FEW_DIGITS], change=shift_images),
        TensorData(test_x, test_y),
        batch_size=10,
        metrics={"test accuracy": 1},
        lr=0.05,
    )
    return with_loss(task)


@recipe(metric="test accuracy", target=0.98, epochs=8)
def mnist_decay(setup):
    """Train a CNN of 9,226 parameters with a warm-up over a tenth of the run, then a cosine."""
    x, y, test_x, test_y = mnist.load(setup.data)
    task = classification_task(
        setup,
        small_mnist_model,
        TensorData(x, y),
        TensorData(test_x, test_y),
        batch_size=32,
        metrics={"test accuracy": 1},
        lr=0.02,
    )
    return with_loss(task)


def small_mnist_model():
    """Return two strided convolutions and a linear layer."""
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 5, stride=2, padding=2), nn.ReLU()),
        *(nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(784, 10)),
    )


def with_loss(task):
    """Return the task with an evaluation that has the loss next to the test accuracy."""
    return replace(task, evaluate=accuracy_and_loss(task.evaluate.dataset, "test accuracy"))


def at_constant_rate(task):
    """Return the task without its schedule, which has already set the rate of the first step."""
    for group in task.optimizer.param_groups:
        group["lr"] = group["initial_lr"]
    return replace(task, scheduler=None)


@recipe(metric="test accuracy", target=0.98, epochs=4)
def mnist_flat(setup):
    """Train the recipe ``mnist:cnn`` at a constant rate."""
    return with_loss(at_constant_rate(mnist.build(setup)))
