"""Tasks of image classification, with cross-entropy as the loss and top-k accuracies as metrics."""

from collections.abc import Callable

import torch
from torch import nn
from torch.optim import SGD

from offbeat_lab.recipes.base import Schedule, Setup, Task
from offbeat_lab.recipes.datasets import Samples
from offbeat_lab.recipes.held_out import accuracy
from offbeat_lab.recipes.schedules import warmup_cosine


def classification_task(
    setup: Setup,
    make_model: Callable[[], nn.Module],
    train: Samples,
    test: Samples,
    *,
    lr: float,
    weight_decay: float = 1e-4,
    schedule: Schedule = warmup_cosine,
    batch_size: int,
    metrics: dict[str, int],
    test_batch_size: int = 1000,
) -> Task:
    """Return a classification task with cross-entropy loss, and SGD with momentum 0.9.

    ``make_model`` is called after torch's global generator is seeded. ``train`` and ``test``
    consist of pairs (image, label). ``metrics`` maps the name of a metric to the k of its top-k
    accuracy.
    """
    torch.manual_seed(setup.seed)
    model = make_model()
    task = Task(
        model=model,
        optimizer=SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=weight_decay),
        scheduler=schedule,
        dataset=train,
        batch_size=batch_size,
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        evaluate=accuracy(test, metrics, batch_size=test_batch_size),
    )
    task.complete(setup)
    return task
