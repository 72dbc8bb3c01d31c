"""The speed of the machine in the run itself: by turns with the method, the workers train alone."""

from collections.abc import Callable, Iterable
from typing import Any

from offbeat.lab.events import Turn
from offbeat.lab.ideal import Alone, Stretch
from offbeat.lab.recipes import Task

TURN = Stretch(warmup_steps=2, least_steps=5, least_seconds=1.0)
"""Short: there is one at every evaluation, and all of them together count."""


class Turns:
    """A short stretch alone before the run and at each evaluation, outside the clock.

    The speed of a machine that others use moves by a third within minutes, so that a step alone
    that was measured in another run, or before and after this one, tells little. Here both are
    measured within seconds of each other, and what slows one down slows down the other.

    Args:
        task: Built anew, for these stretches alone: what the method trains is not touched.
        lr_scale: Factor on the learning rate.
        batches: What this worker reads, anew each time.
    """

    def __init__(self, task: Task, lr_scale: float, batches: Callable[[], Iterable[Any]]) -> None:
        self._told = task, lr_scale, batches

    def take(self, step: int) -> Turn:
        """Train alone for a while. A collective, so that all workers do so at the same time."""
        alone = Alone(*self._told, TURN)
        alone.measure()
        return Turn(step, alone.step_seconds)
