"""Events that report the progress of a run.

Rank 0 emits the events. ``step`` is the number of steps that rank 0 has taken. For the final
``Evaluation`` it is the mean over the workers. If the workers lease their data, ``step`` is the
position of the run (``lab.leased``).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

from offbeat import Stats


@dataclass(frozen=True)
class Start:
    """Training starts: ``steps`` steps per worker, with parameters of ``model_bytes`` bytes."""

    steps: int
    model_bytes: int


@dataclass(frozen=True)
class Step:
    """Rank 0 took a step.

    Attributes:
        step: Number of steps.
        seconds: Training seconds of rank 0 so far: computing and waiting, without evaluations.
        wait_seconds: Seconds of these in which rank 0 waited; zero where not measured.
        payload_bytes: Bytes that rank 0 has sent so far; zero where not measured.
        loss: Loss of rank 0's batch. None: not known, or not read in this step.
    """

    step: int
    seconds: float
    wait_seconds: float = 0.0
    payload_bytes: int = 0
    loss: float | None = None


@dataclass(frozen=True)
class Evaluation:
    """All workers evaluated the mean of their models at a step, or a parameter server's model.

    The evaluations follow in the order of their steps, after the training.

    Attributes:
        step: Number of steps of each worker. At the end of a run whose workers have taken different
            numbers of steps: their mean, rounded.
        seconds: Training seconds at this step: the largest over the workers, or the mean for the
            reference ``ideal``.
        metric: The metric that is compared with the recipe's target.
        metrics: All metrics by name, ``metric`` included.
        finite: True if all parameters of the model are finite. A model with NaN can have a finite
            metric: its accuracy is that of a constant prediction.
    """

    step: int
    seconds: float
    metric: float
    metrics: dict[str, float]
    finite: bool = True

    @property
    def diverged(self) -> bool:
        """True if the model or a metric contains NaN or infinity."""
        return not (self.finite and all(map(math.isfinite, (self.metric, *self.metrics.values()))))


@dataclass(frozen=True)
class Waiting:
    """The run does not train until the next event. ``what`` says why, such as "evaluating"."""

    what: str


@dataclass(frozen=True)
class End:
    """Training has ended.

    Attributes:
        stats: Totals of every worker, in rank order.
        step_seconds: Time of a step, if only the end of the run determines it (method ``ideal``).
            The reader of the events then replaces the seconds of an evaluation at step s by
            s · step_seconds. None: the seconds in the events are final.
    """

    stats: tuple[Stats, ...]
    step_seconds: float | None = None


Event: TypeAlias = Start | Step | Evaluation | Waiting | End


def stats_of(values: Mapping[str, Any]) -> Stats:
    """Return the ``Stats`` whose ``to_dict`` returned ``values``. Missing totals are 0."""
    names = [field.name for field in fields(Stats)]
    return Stats(**{name: values[name] for name in names if name in values})
