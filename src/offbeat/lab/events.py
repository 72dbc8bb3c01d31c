"""Events of a run: values within a process, lines of JSON between processes and in checkpoints.

``step`` is the number of steps that each worker has taken so far.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeAlias

from offbeat.telemetry import Stats


@dataclass(frozen=True)
class Start:
    """The start of training: steps of each worker, and size of the model's parameters."""

    steps: int
    model_bytes: int


@dataclass(frozen=True)
class Step:
    """A step without an evaluation.

    Attributes:
        step: Number of steps.
        seconds: Training seconds of rank 0: computing and waiting, without evaluation.
    """

    step: int
    seconds: float


@dataclass(frozen=True)
class Evaluation:
    """A step, followed by an evaluation of the consensus.

    Attributes:
        step: Number of steps.
        seconds: Training seconds of rank 0, as in ``Step``.
        metric: Value of the recipe's metric.
        metrics: Values of all metrics by name, the recipe's metric included.
    """

    step: int
    seconds: float
    metric: float
    metrics: dict[str, float]


@dataclass(frozen=True)
class Waiting:
    """The start of something other than training, described by ``what``, until the next event."""

    what: str


@dataclass(frozen=True)
class EvaluationCount:
    """The number of evaluations that the run has chosen, given the expected seconds of one."""

    evaluations: int
    seconds: float


@dataclass(frozen=True)
class LinkSpeed:
    """Bandwidth of the slowest link in one direction, all links being busy, and median latency."""

    bytes_per_second: float
    latency_seconds: float


@dataclass(frozen=True)
class LocalStepTime:
    """Mean step time without communication; sleeps of ``lab.stragglers`` are multiples of it."""

    step_seconds: float


@dataclass(frozen=True)
class Calibration:
    """Mean step time without communication, measured within the run but off its clock."""

    step: int
    step_seconds: float


@dataclass(frozen=True)
class Resumed:
    """The continuation from a checkpoint of ``step``. The events that it repeats follow."""

    step: int


@dataclass(frozen=True)
class Stopped:
    """The early end of a run on request, after all workers saved a checkpoint in ``directory``."""

    step: int
    directory: str


@dataclass(frozen=True)
class NotSaved:
    """The early end of a run on request, without a checkpoint, for the reason ``why``."""

    why: str


@dataclass(frozen=True)
class End:
    """The end of training.

    Attributes:
        stats: Totals of every worker, in rank order.
        step_seconds: Duration of every step, for a method that knows it only now (``ideal``); it
            replaces the seconds of all earlier events. None: those are valid.
    """

    stats: tuple[Stats, ...]
    step_seconds: float | None = None


Event: TypeAlias = (
    Start
    | Step
    | Evaluation
    | Waiting
    | EvaluationCount
    | LinkSpeed
    | LocalStepTime
    | Calibration
    | Resumed
    | Stopped
    | NotSaved
    | End
)

_KINDS: dict[str, Any] = {  # the names are part of the checkpoints of runs
    **{"start": Start, "step": Step, "evaluation": Evaluation, "waiting": Waiting, "end": End},
    **{"chosen": EvaluationCount, "measured": LinkSpeed, "paced": LocalStepTime},
    **{"turn": Calibration, "resumed": Resumed, "left": Stopped, "unsaved": NotSaved},
}
_NAMES = {kind: name for name, kind in _KINDS.items()}


def to_json(event: Event) -> str:
    """Return an event as one line of JSON."""
    values = {name: value for name, value in asdict(event).items() if value is not None}
    if isinstance(event, End):
        values["stats"] = [stats.to_dict() for stats in event.stats]
    return json.dumps({"event": _NAMES[type(event)], **values})


def from_json(line: str | bytes) -> Event:
    """Return the event of a line that ``to_json`` made."""
    values = json.loads(line)
    kind = _KINDS[values.pop("event")]
    if kind is End:
        values["stats"] = tuple(map(stats_of, values["stats"]))
    event: Event = kind(**values)
    return event


def stats_of(values: Mapping[str, Any]) -> Stats:
    """Return the ``Stats`` of the values of ``Stats.to_dict()``, without its derived ones."""
    known = {field.name: values[field.name] for field in fields(Stats) if field.name in values}
    if values.get("flags"):  # version 0.1.0 wrote them outside the details
        known["details"] = {"flags": values["flags"], **known.get("details", {})}
    return Stats(**known)
