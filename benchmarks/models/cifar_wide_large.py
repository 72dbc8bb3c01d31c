"""``cifar_wide.py`` with four times the parameters, 8.5 million: four times the bytes to send."""

from cifar_wide import task

from offbeat.lab import recipe


@recipe(metric="accuracy", target=0.6, epochs=4)
def cifar_wide_large(setup):
    """Train at a constant rate."""
    return task(setup, hidden=4096)
