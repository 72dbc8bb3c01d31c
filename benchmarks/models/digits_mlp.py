"""Three linear layers on scikit-learn's digits: 149,110 parameters, and a step of a millisecond.

It is for hundreds of runs; the convolutions of the recipe ``digits`` take seven times as long.
"""

import torch
from torch import nn

from offbeat_lab import Task, accuracy, recipe
from offbeat_lab.recipes.datasets import TensorData, shift_images
from offbeat_lab.recipes.digits import load
from offbeat_lab.recipes.schedules import warmup_cosine


@recipe(metric="test accuracy", target=0.97, epochs=16)
def digits_mlp(setup):
    """Train with data, optimizer and schedule of ``digits``."""
    x, y, test_x, test_y = load()
    model = nn.Sequential(
        *(nn.Flatten(), nn.Linear(64, 350), nn.ReLU()),
        *(nn.Linear(350, 350), nn.ReLU(), nn.Linear(350, 10)),
    )
    return Task(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4),
        scheduler=warmup_cosine,
        dataset=TensorData(x, y, change=shift_images),
        batch_size=32,
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        evaluate=accuracy(TensorData(test_x, test_y), {"test accuracy": 1}),
    )
