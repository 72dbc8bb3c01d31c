"""``cifar_wide.py`` with a rate that rises, and then falls to nothing, for what a run ends with."""

from cifar_wide import task

from offbeat.lab import recipe
from offbeat.lab.recipes.schedules import warmup_cosine


@recipe(metric="accuracy", target=0.6, epochs=4)
def cifar_wide_decay(setup):
    """A tenth of the run upwards, then half a cosine."""
    return task(setup, warmup_cosine)
