"""Three linear layers on MNIST with AdamW: 109,386 parameters, for up to 256 workers.

It is a custom recipe: ``offbeat compare benchmarks/models/mnist_mlp.py --data DIR`` with the
directory of the IDX files.
"""

import torch
from torch import nn

from offbeat_lab import Task, accuracy, recipe
from offbeat_lab.recipes.datasets import TensorData
from offbeat_lab.recipes.mnist import load
from offbeat_lab.recipes.schedules import warmup_cosine


@recipe(metric="test accuracy", target=0.9, epochs=0.16)
def mnist_mlp(setup):
    """Train with batches of 8, in 300 steps with four workers."""
    x, y, test_x, test_y = load(setup.data)
    model = nn.Sequential(
        *(nn.Flatten(), nn.Linear(784, 128), nn.ReLU()),
        *(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)),
    )
    return Task(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.002),
        scheduler=warmup_cosine,
        dataset=TensorData(x, y),
        batch_size=8,
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        evaluate=accuracy(TensorData(test_x, test_y), {"test accuracy": 1}),
    )
