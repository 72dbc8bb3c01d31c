"""Events that report the progress of a run, and their form as lines of JSON.

Worker 0 sends the lines to the process that started it. A checkpoint contains some of them.
``step`` is always the number of steps that rank 0 has taken so far. *Local step time* is the time
of a step without communication.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeAlias

from offbeat.telemetry import Stats


@dataclass(frozen=True)
class Start:
    """Training starts: ``steps`` steps per worker, with parameters of ``model_bytes`` bytes."""

    steps: int
    model_bytes: int


@dataclass(frozen=True)
class Step:
    """Rank 0 took a step that was not followed by an evaluation.

    Attributes:
        step: Number of steps.
        seconds: Training seconds of rank 0 so far: computing and waiting, without evaluations.
    """

    step: int
    seconds: float


@dataclass(frozen=True)
class Evaluation:
    """All workers evaluated the consensus: the mean of their models, or a parameter server's model.

    Attributes:
        step: Number of steps.
        seconds: Training seconds of rank 0 so far, as in ``Step``.
        metric: Value of the recipe's main metric.
        metrics: Values of all metrics by name, the main metric included.
    """

    step: int
    seconds: float
    metric: float
    metrics: dict[str, float]


@dataclass(frozen=True)
class Waiting:
    """Until the next event, the run does something other than training, such as "evaluating"."""

    what: str


@dataclass(frozen=True)
class EvaluationCount:
    """The run chose its number of evaluations. One is expected to take ``seconds``."""

    evaluations: int
    seconds: float


@dataclass(frozen=True)
class LinkSpeed:
    """Measured bandwidth of the slowest link while all links are in use, and median latency."""

    bytes_per_second: float
    latency_seconds: float


@dataclass(frozen=True)
class LocalStepTime:
    """Local step time t, measured or set by the job. Artificial stragglers sleep multiples of t."""

    step_seconds: float


@dataclass(frozen=True)
class Calibration:
    """Local step time, averaged over the workers, measured after ``step`` training steps.

    The measurement does not count as training time.
    """

    step: int
    step_seconds: float


@dataclass(frozen=True)
class Resumed:
    """The run continues from the checkpoint of ``step``. The events in the checkpoint follow."""

    step: int


@dataclass(frozen=True)
class Stopped:
    """The run was asked to stop early, and has saved a checkpoint in ``directory``."""

    step: int
    directory: str


@dataclass(frozen=True)
class NotSaved:
    """The run was asked to stop early and did not save a checkpoint. ``why`` is the reason."""

    why: str


@dataclass(frozen=True)
class End:
    """Training has ended.

    Attributes:
        stats: Totals of every worker, in rank order.
        step_seconds: Duration of a step, if it is known only at the end of the run, as with the
            baseline ``ideal``. The seconds of earlier events are then replaced by
            step · step_seconds. None: the seconds of earlier events are valid.
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
    """Return the event that ``to_json`` converted to ``line``."""
    values = json.loads(line)
    kind = _KINDS[values.pop("event")]
    if kind is End:
        values["stats"] = tuple(map(stats_of, values["stats"]))
    event: Event = kind(**values)
    return event


def stats_of(values: Mapping[str, Any]) -> Stats:
    """Return the ``Stats`` whose ``to_dict`` returned ``values``. Derived values are ignored."""
    known = {field.name: values[field.name] for field in fields(Stats) if field.name in values}
    if values.get("flags"):  # version 0.1.0 wrote them outside the details
        known["details"] = {"flags": values["flags"], **known.get("details", {})}
    return Stats(**known)
