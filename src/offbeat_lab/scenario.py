"""Scenarios: workers that die and join, and speeds and bandwidths that change during a run.

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

    [[event]]
    at = "50s"
    worker = 2
    die = true           # its process is killed

    [[event]]
    at = "60s"
    join = true          # a further worker; with worker = 2, that one comes back as a new process

Each further worker has the next number. A worker that comes back has its earlier speed and
bandwidth. Processes are numbered by their *rank*, in the order of their start.

A *job* stores the events of its scenario as JSON text, which does not depend on the file.
"""

import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from offbeat.extend import (
    Range,
    did_you_mean,
    require_integer,
    require_number,
    to_bandwidth,
    to_seconds,
)

_KEYS = ("at", "worker", "speed", "bandwidth", "die", "join")
_SPEED = Range(above=0, hint="0.5: half as fast")

Changes: TypeAlias = dict[float, dict[int, float]]
"""Values by time in seconds (ascending), and by rank or by the number of the worker."""


@dataclass(frozen=True)
class ScenarioEvent:
    """A change of one worker or of all workers.

    Attributes:
        at: Time from which the change holds, in seconds since the start of the training (≥ 0).
        worker: Number of the worker. None: all workers.
        speed: Speed relative to the usual one (> 0; 0.5 is half as fast). None: no change.
        bandwidth: Bandwidth of the worker's link in both directions, in bits per second. None: no
            change.
        alive: False: the process of the worker is killed. True: a new one starts. None: no change.
    """

    at: float
    worker: int | None = None
    speed: float | None = None
    bandwidth: float | None = None
    alive: bool | None = None


@dataclass(frozen=True)
class Process:
    """A process of a worker.

    Attributes:
        worker: Number of the worker.
        start: Time of its start, in seconds since the start of the training.
        end: Time at which it is killed; infinite if it is not.
    """

    worker: int
    start: float = 0.0
    end: float = math.inf


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
        read: list[tuple[int, ScenarioEvent]] = []
        for number, values in enumerate(events, start=1):
            try:
                read.append((number, _read_event(values)))
            except (ValueError, TypeError) as error:
                raise ValueError(f"scenario {path}, event {number}: {error}") from None
        return cls(_numbered(sorted(read, key=lambda each: each[1].at), workers, path))

    @classmethod
    def from_json(cls, text: str | None) -> "Scenario":
        """Return the scenario whose ``str`` is ``text``. None: a scenario without events."""
        return cls(tuple(ScenarioEvent(**values) for values in json.loads(text or "[]")))

    def __str__(self) -> str:
        events = ({k: v for k, v in asdict(e).items() if v is not None} for e in self.events)
        return json.dumps([*events])

    @property
    def elastic(self) -> bool:
        """True if workers die or join."""
        return any(event.alive is not None for event in self.events)

    def processes(self, workers: int) -> list[Process]:
        """Return the processes of a run that begins with ``workers`` workers, by rank."""
        processes = [Process(worker) for worker in range(workers)]
        for event in self.events:
            if event.alive and event.worker is not None:
                processes.append(Process(event.worker, event.at))
            elif event.alive is False:
                rank = max(r for r, each in enumerate(processes) if each.worker == event.worker)
                processes[rank] = replace(processes[rank], end=event.at)
        return processes

    def slowdowns(self, workers: int) -> Changes:
        """Return factors on the compute time by rank."""
        speeds = self.changes("speed", workers).items()
        slow = {at: {worker: 1 / x for worker, x in values.items()} for at, values in speeds}
        return {at: self.by_rank(values, workers) for at, values in slow.items()}

    def bandwidths(self, workers: int) -> Changes:
        """Return bits per second by rank."""
        changes = self.changes("bandwidth", workers).items()
        return {at: self.by_rank(values, workers) for at, values in changes}

    def by_rank(self, values: Mapping[int, float], workers: int) -> dict[int, float]:
        """Return values by rank, given ``values`` by the number of the worker."""
        processes = enumerate(self.processes(workers))
        return {rank: values[each.worker] for rank, each in processes if each.worker in values}

    def changes(self, name: Literal["speed", "bandwidth"], workers: int) -> Changes:
        """Return the values by the number of the worker. Of several at a time, the last counts."""
        changes: Changes = {}
        every = {process.worker for process in self.processes(workers)}
        for event in self.events:
            value = getattr(event, name)
            if value is not None:
                changed = every if event.worker is None else (event.worker,)
                changes.setdefault(event.at, {}).update(dict.fromkeys(changed, value))
        return changes


def value_at(changes: Changes, rank: int, now: float, usual: float) -> float:
    """Return the value of ``rank`` at time ``now``, which is ``usual`` before the first change."""
    for since, values in changes.items():
        if since <= now:
            usual = values.get(rank, usual)
    return usual


def _numbered(
    events: Sequence[tuple[int, ScenarioEvent]], workers: int, path: Path
) -> tuple[ScenarioEvent, ...]:
    """Return the events, and give each further worker its number.

    ``events`` are pairs of a number in the file and an event, in the order of the times.

    Raises:
        ValueError: an event does not fit to the workers that exist or are alive at its time.
    """
    alive, known, result = {*range(workers)}, workers, []
    for number, event in events:
        worker, reason = event.worker, ""
        if event.alive and worker is None:
            worker, known = known, known + 1
        if worker is not None and worker >= known:
            reason = f"worker {worker} does not exist then: ranks are 0 to {known - 1}"
        elif event.alive is not None and worker is not None:
            if event.alive == (worker in alive):
                reason = f"worker {worker} is {'alive' if event.alive else 'dead'} then"
            alive ^= {worker}
            reason = reason or ("" if alive else "no worker is left")
        if reason:
            raise ValueError(f"scenario {path}, event {number}: {reason}")
        result.append(replace(event, worker=worker))
    return tuple(result)


def _read_event(values: Any) -> ScenarioEvent:
    """Return the event in a table of the file.

    Raises:
        ValueError, TypeError: a key is unknown or missing, or a value is invalid.
    """
    if not isinstance(values, dict):
        raise TypeError(f"must be a table [[event]], got {values!r}")
    for key in values:
        if key not in _KEYS:
            raise ValueError(
                f"unknown key {key!r}{did_you_mean(key, _KEYS)}; there are {', '.join(_KEYS)}"
            )
    if "at" not in values:
        raise ValueError('without "at", the time of the event, as in at = "20s"')
    if values.keys() <= {"at", "worker"}:
        raise ValueError("changes nothing: give speed, bandwidth, die or join")
    worker, speed, bandwidth = (values.get(key) for key in ("worker", "speed", "bandwidth"))
    if worker is not None:
        require_integer("worker", worker, least=0)
    if speed is not None:
        require_number("speed", speed, _SPEED)
    for key in ("die", "join"):
        if values.get(key, True) is not True:
            raise ValueError(f"{key} must be true, got {values[key]!r}")
    if "die" in values and (worker is None or values.keys() - {"at", "worker", "die"}):
        raise ValueError("die = true needs worker = RANK, and nothing else")
    return ScenarioEvent(
        at=to_seconds(values["at"], allow_zero=True),
        worker=worker,
        speed=None if speed is None else float(speed),
        bandwidth=None if bandwidth is None else to_bandwidth(bandwidth),
        alive=False if "die" in values else True if "join" in values else None,
    )
