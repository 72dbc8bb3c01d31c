"""Scenarios: speeds of workers and bandwidths of links that change during a run.

A scenario is a TOML file with one table ``[[event]]`` for each change, for example::

    [[event]]
    at = 20              # seconds since the start of the training, or text such as "20s"
    worker = 2           # rank; without it, the event holds for all workers
    speed = 0.5          # from now on half as fast as usual

    [[event]]
    at = "40s"
    worker = 2
    speed = 1            # as usual again
    bandwidth = "10Mbit/s"

A *job* stores the events of its scenario as JSON text, which does not depend on the file.
"""

import json
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from offbeat.arguments import Range, did_you_mean, require_integer, require_number
from offbeat.units import to_bandwidth, to_seconds

_KEYS = ("at", "worker", "speed", "bandwidth")
_SPEED = Range(above=0, hint="0.5: half as fast")
_MEMBERSHIP = ("die", "join")

Changes: TypeAlias = dict[Any, dict[int, float]]
"""Values by time in seconds and by rank."""


@dataclass(frozen=True)
class ScenarioEvent:
    """A change of one worker or of all workers.

    Attributes:
        at: Time from which the change holds, in seconds since the start of the training (≥ 0).
        worker: Rank of the worker. None: all workers.
        speed: Speed relative to the usual one (> 0; 0.5 is half as fast). None: no change.
        bandwidth: Bandwidth of the worker's link in both directions, in bits per second. None: no
            change.
    """

    at: float
    worker: int | None = None
    speed: float | None = None
    bandwidth: float | None = None


@dataclass(frozen=True)
class Scenario:
    """The events of a scenario, in the order of their times.

    ``str(scenario)`` is JSON text that ``from_json`` reads.
    """

    events: tuple[ScenarioEvent, ...] = ()

    @classmethod
    def read(cls, path: Path, workers: int) -> "Scenario":
        """Read a scenario file for a run with ``workers`` workers.

        Raises:
            ValueError: the file does not exist, is not TOML, or an event is invalid. The message
                names the file and the event.
        """
        try:
            tables = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else f"not TOML: {error}"
            raise ValueError(f"scenario {path}: {reason}") from None
        for key in tables:
            if key != "event":
                raise ValueError(
                    f"scenario {path}: unknown key {key!r}; it consists of tables [[event]]"
                )
        events = tables.get("event", [])
        if not isinstance(events, list) or not events:
            raise ValueError(f"scenario {path}: it must have one or more tables [[event]]")
        read = []
        for number, values in enumerate(events, start=1):
            try:
                read.append(_read_event(values, workers))
            except (ValueError, TypeError) as error:
                raise ValueError(f"scenario {path}, event {number}: {error}") from None
        return cls(tuple(sorted(read, key=lambda event: event.at)))

    @classmethod
    def from_json(cls, text: str | None) -> "Scenario":
        """Return the scenario whose ``str`` is ``text``. None: a scenario without events."""
        return cls(tuple(ScenarioEvent(**values) for values in json.loads(text or "[]")))

    def __str__(self) -> str:
        events = ({k: v for k, v in asdict(e).items() if v is not None} for e in self.events)
        return json.dumps([*events])

    def slowdowns(self, workers: int) -> Changes:
        """Return factors on the compute time; see ``Compute.changes``."""
        speeds = self._changes("speed", workers)
        return {at: {rank: 1 / x for rank, x in by.items()} for at, by in speeds.items()}

    def bandwidths(self, workers: int) -> Changes:
        """Return bits per second; see ``Network.per_worker_changes``."""
        return self._changes("bandwidth", workers)

    def _changes(self, name: str, workers: int) -> Changes:
        """Return the values of an attribute. Of several at the same time, the last one counts."""
        changes: Changes = {}
        for event in self.events:
            value = getattr(event, name)
            if value is not None:
                ranks = range(workers) if event.worker is None else (event.worker,)
                changes.setdefault(event.at, {}).update(dict.fromkeys(ranks, value))
        return changes


def _read_event(values: Any, workers: int) -> ScenarioEvent:
    """Return the event in a table of the file.

    Raises:
        ValueError, TypeError: a key is unknown or missing, or a value is invalid.
    """
    if not isinstance(values, dict):
        raise TypeError(f"must be a table [[event]], got {values!r}")
    for key in values:
        if key in _MEMBERSHIP:
            raise ValueError(
                f"{key}: a run has a fixed set of workers, because all of them take part in its "
                "evaluations; offbeat.simulate has the faults Kill and Join"
            )
        if key not in _KEYS:
            raise ValueError(
                f"unknown key {key!r}{did_you_mean(key, _KEYS)}; there are {', '.join(_KEYS)}"
            )
    if "at" not in values:
        raise ValueError('without "at", the time of the event, as in at = "20s"')
    if values.keys() <= {"at", "worker"}:
        raise ValueError("changes nothing: give speed, bandwidth or both")
    worker, speed, bandwidth = (values.get(key) for key in ("worker", "speed", "bandwidth"))
    if worker is not None:
        require_integer("worker", worker, least=0)
        if worker >= workers:
            raise ValueError(f"worker {worker} does not exist: ranks are 0 to {workers - 1}")
    if speed is not None:
        require_number("speed", speed, _SPEED)
    return ScenarioEvent(
        at=to_seconds(values["at"], allow_zero=True),
        worker=worker,
        speed=None if speed is None else float(speed),
        bandwidth=None if bandwidth is None else to_bandwidth(bandwidth),
    )
