"""``cifar_wide.py`` with a warm-up and a decay to 0, for comparisons of the final metric."""

from cifar_wide import task

from offbeat.lab import recipe
from offbeat.lab.recipes.schedules import warmup_cosine


@recipe(metric="accuracy", target=0.6, epochs=4)
def cifar_wide_decay(setup):
    """Train with a warm-up over a tenth of the run, then half a cosine."""
    return task(setup, warmup_cosine)
