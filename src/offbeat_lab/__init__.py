"""Experiments: baselines, recipes, worker processes on slow links, comparisons and reports.

A *recipe* is a training task with a target: model, data, optimizer, schedule, metric. A *baseline*
is a published strategy to compare with. This package exports the baselines, and what a file with a
custom recipe needs.
"""

from typing import TYPE_CHECKING

from offbeat.extend import import_lazily

__all__ = [
    "EASGD",
    "SSP",
    "Downpour",
    "FedAvg",
    "GradientSelSync",
    "HeldOut",
    "PowerSGD",
    "Setup",
    "SparseLoCo",
    "Task",
    "accuracy",
    "decay_at",
    "decay_every",
    "recipe",
    "warmup_cosine",
]

if TYPE_CHECKING:
    from offbeat_lab.baselines import (
        EASGD,
        SSP,
        Downpour,
        FedAvg,
        GradientSelSync,
        PowerSGD,
        SparseLoCo,
    )
    from offbeat_lab.recipes.base import Setup, Task
    from offbeat_lab.recipes.custom import recipe
    from offbeat_lab.recipes.held_out import HeldOut, accuracy
    from offbeat_lab.recipes.schedules import decay_at, decay_every, warmup_cosine
else:
    __getattr__ = import_lazily(
        __name__,
        __all__,
        ("recipes.base", "recipes.custom", "recipes.held_out", "recipes.schedules", "baselines"),
    )
