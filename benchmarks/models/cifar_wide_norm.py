"""``cifar_wide.py`` with BatchNorm, whose statistics are buffers without gradients."""

from cifar_wide import task

from offbeat.lab import recipe


@recipe(metric="accuracy", target=0.6, epochs=4)
def cifar_wide_norm(setup):
    """Train at a constant rate."""
    return task(setup, norm=True)
