"""``cifar_wide.py`` with BatchNorm, whose statistics are buffers that nobody's gradient moves."""

from cifar_wide import task

from offbeat.lab import recipe


@recipe(metric="accuracy", target=0.6, epochs=4)
def cifar_wide_norm(setup):
    """The same rate throughout."""
    return task(setup, norm=True)
