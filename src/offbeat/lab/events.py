"""What a run tells while it goes on: values between objects, lines of JSON between processes."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeAlias

from offbeat.telemetry import Stats


@dataclass(frozen=True)
class Start:
    """Training begins.

    Attributes:
        steps: How many steps each worker will take.
        model_bytes: Size of the model's parameters.
    """

    steps: int
    model_bytes: int


@dataclass(frozen=True)
class Step:
    """A step is taken, after which nothing was evaluated.

    Attributes:
        step: Steps each worker has taken.
        seconds: Training seconds of rank 0: computing and waiting, without evaluation.
    """

    step: int
    seconds: float


@dataclass(frozen=True)
class Evaluation:
    """A step is taken, and the consensus of the workers evaluated.

    Attributes:
        step: Steps each worker has taken.
        seconds: Training seconds of rank 0: computing and waiting, without evaluation.
        metric: The recipe's metric.
        metrics: All metrics by name, that one among them.
    """

    step: int
    seconds: float
    metric: float
    metrics: dict[str, float]


@dataclass(frozen=True)
class Waiting:
    """Rank 0 does something else than train, until the next event.

    Attributes:
        what: In a few words.
    """

    what: str


@dataclass(frozen=True)
class Chosen:
    """How often the run evaluates, chosen by what an evaluation will take.

    Attributes:
        evaluations: The number, the end included.
        seconds: What one takes.
    """

    evaluations: int
    seconds: float


@dataclass(frozen=True)
class Measured:
    """The links, before the training or after it; see ``measure_links``.

    Attributes:
        bytes_per_second: Of the slowest link, one way, while all are busy.
        latency_seconds: Of one message, the median.
    """

    bytes_per_second: float
    latency_seconds: float


@dataclass(frozen=True)
class Paced:
    """What uneven workers' sleeps are multiples of; see ``lab.uneven``.

    Attributes:
        step_seconds: A step of a worker alone, the mean over the workers.
    """

    step_seconds: float


@dataclass(frozen=True)
class Turn:
    """The workers have trained alone for a moment, outside the clock; see ``lab.turns``.

    Attributes:
        step: Steps each worker had taken.
        step_seconds: A step of a worker alone, the mean over the workers.
    """

    step: int
    step_seconds: float


@dataclass(frozen=True)
class Resumed:
    """The run goes on from a checkpoint; what it had told until then follows.

    Attributes:
        step: Steps each worker had taken.
    """

    step: int


@dataclass(frozen=True)
class Left:
    """The run was asked to end early: all workers have saved, and leave.

    Attributes:
        step: Steps each worker has taken.
        directory: Where the checkpoint is.
    """

    step: int
    directory: str


@dataclass(frozen=True)
class Unsaved:
    """The run was asked to end early, and ends without a checkpoint of where it was.

    Attributes:
        why: In a few words.
    """

    why: str


@dataclass(frozen=True)
class End:
    """Training is over.

    Attributes:
        stats: The totals of every worker, in rank order.
        step_seconds: What each step counts in truth, where that is known now only (``ideal``): the
            seconds of all events before are this many for each step. None: as they told.
    """

    stats: tuple[Stats, ...]
    step_seconds: float | None = None


Event: TypeAlias = (
    Start
    | Step
    | Evaluation
    | Waiting
    | Chosen
    | Measured
    | Paced
    | Turn
    | Resumed
    | Left
    | Unsaved
    | End
)

_KINDS: dict[str, Any] = {
    "start": Start,
    "step": Step,
    "evaluation": Evaluation,
    "waiting": Waiting,
    "chosen": Chosen,
    "measured": Measured,
    "paced": Paced,
    "turn": Turn,
    "resumed": Resumed,
    "left": Left,
    "unsaved": Unsaved,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}


def to_json(event: Event) -> str:
    """An event as one line of JSON."""
    if isinstance(event, End):
        stats = [one.to_dict() for one in event.stats]
        known = {} if event.step_seconds is None else {"step_seconds": event.step_seconds}
        return json.dumps({"event": "end", "stats": stats, **known})
    return json.dumps({"event": _NAMES[type(event)], **asdict(event)})


def from_json(line: str | bytes) -> Event:
    """The event of a line that ``to_json`` made."""
    values = json.loads(line)
    name = values.pop("event")
    if name == "end":
        return End(tuple(stats_of(one) for one in values["stats"]), values.get("step_seconds"))
    event: Event = _KINDS[name](**values)
    return event


def stats_of(values: Mapping[str, Any]) -> Stats:
    """The totals of ``Stats.to_dict()``; what it derives from others is derived anew."""
    told = {one.name: values[one.name] for one in fields(Stats) if one.name in values}
    if values.get("flags"):  # 0.1.0 wrote them beside the details only
        told["details"] = {"flags": values["flags"], **told.get("details", {})}
    return Stats(**told)
