"""The speed of the machine in the run itself: by turns with the method, the workers train alone."""

from collections.abc import Callable, Iterable
from typing import Any

from offbeat.lab.events import Turn
from offbeat.lab.ideal import Alone, Stretch
from offbeat.lab.recipes import Task

TURN = Stretch(warmup_steps=2, least_steps=5, least_seconds=1.0)
"""Short: there is one at every evaluation, and all of them together count."""


def take_turn(step: int, task: Task, lr_scale: float, batches: Callable[[], Iterable[Any]]) -> Turn:
    """Train alone for a short while, outside the clock. A collective, so that all do so together.

    The speed of a machine that others use moves by a third within minutes, so that a step alone
    that was measured in another run, or before and after this one, tells little. Here both are
    measured within seconds of each other, and what slows one down slows down the other.

    Args:
        step: Steps each worker has taken of the run.
        task: Built anew, for these stretches alone: what the method trains is not touched.
        lr_scale: Factor on the learning rate.
        batches: What this worker reads, anew each time.
    """
    alone = Alone(task, lr_scale, batches, TURN)
    alone.measure()
    return Turn(step, alone.step_seconds)
