"""Events of a run: values within a process, lines of JSON between processes and in checkpoints."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeAlias

from offbeat.telemetry import Stats


@dataclass(frozen=True)
class Start:
    """The start of training.

    Attributes:
        steps: Number of steps that each worker will take.
        model_bytes: Size of the model's parameters.
    """

    steps: int
    model_bytes: int


@dataclass(frozen=True)
class Step:
    """A step without an evaluation.

    Attributes:
        step: Number of steps that each worker has taken.
        seconds: Training seconds of rank 0: computing and waiting, without evaluation.
    """

    step: int
    seconds: float


@dataclass(frozen=True)
class Evaluation:
    """A step, followed by an evaluation of the consensus.

    Attributes:
        step: Number of steps that each worker has taken.
        seconds: Training seconds of rank 0: computing and waiting, without evaluation.
        metric: Value of the recipe's metric.
        metrics: Values of all metrics by name, the recipe's metric included.
    """

    step: int
    seconds: float
    metric: float
    metrics: dict[str, float]


@dataclass(frozen=True)
class Waiting:
    """The start of something other than training, which lasts until the next event.

    Attributes:
        what: Description in a few words.
    """

    what: str


@dataclass(frozen=True)
class EvaluationCount:
    """The number of evaluations, chosen by the run from what one costs.

    Attributes:
        evaluations: Number of evaluations, the final one included.
        seconds: Expected duration of one.
    """

    evaluations: int
    seconds: float


@dataclass(frozen=True)
class LinkSpeed:
    """The measured links between the workers, before or after the training.

    Attributes:
        bytes_per_second: Bandwidth of the slowest link in one direction, while all links are busy.
        latency_seconds: Median latency of one message.
    """

    bytes_per_second: float
    latency_seconds: float


@dataclass(frozen=True)
class LocalStepTime:
    """The step time that the sleeps of stragglers are multiples of; see ``lab.stragglers``.

    Attributes:
        step_seconds: Step time without communication, the mean over the workers.
    """

    step_seconds: float


@dataclass(frozen=True)
class Calibration:
    """A measurement of the step time without communication, within a run and off its clock.

    Attributes:
        step: Number of steps of the run that each worker had taken.
        step_seconds: Step time without communication, the mean over the workers.
    """

    step: int
    step_seconds: float


@dataclass(frozen=True)
class Resumed:
    """The continuation from a checkpoint. The events that it repeats follow.

    Attributes:
        step: Number of steps that each worker had taken.
    """

    step: int


@dataclass(frozen=True)
class Stopped:
    """The early end of a run on request, after all workers have saved a checkpoint.

    Attributes:
        step: Number of steps that each worker has taken.
        directory: Directory of the checkpoint.
    """

    step: int
    directory: str


@dataclass(frozen=True)
class NotSaved:
    """The early end of a run on request, without a checkpoint.

    Attributes:
        why: Reason in a few words.
    """

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
