"""On what clock the runs of the race are compared: the machine's speed moves while they run.

The ideal's step is what workers alone take; on a machine that others use it moves by a third within
a quarter of an hour, and a method's step with it. A run that trained alone by turns
(``offbeat.lab.turns``) knows how fast the machine was meanwhile: its seconds are told as on a
machine on which the ideal's step stayed what it was in the ideal's own run.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from offbeat.lab.results import Result, read_results


def read(folder: Path, track: str, *, steady: bool = False) -> dict[str, list[Result]]:
    """The results of every cell of a track that have an ideal, by the cell's name.

    Args:
        folder: Of the results.
        track: Which runs.
        steady: One step for all runs of the ideal of a workload, the mean of theirs; for methods
            that took no turns it varies what they are measured against less. Cells whose workers
            are uneven are left out.
    """
    found = {}
    for path in sorted(folder.glob(f"race-{track}-*.jsonl")):
        results = read_results(path)
        if any(one.is_ideal for one in results) and "tiny" not in path.stem:
            found[path.stem.split("-", 2)[2]] = results
    if steady:
        found = {cell: runs for cell, runs in found.items() if not _uneven(runs[0])}
    steps: dict[str, list[float]] = {}
    for cell, runs in found.items():
        steps.setdefault(workload(cell), []).extend(_step(one) for one in runs if one.is_ideal)
    return {
        cell: on_one_clock(runs, statistics.fmean(steps[workload(cell)]) if steady else None)
        for cell, runs in found.items()
    }


def workload(cell: str) -> str:
    """What a cell trains, of its name."""
    return cell.partition("-")[0]


def on_one_clock(results: Sequence[Result], step_seconds: float | None = None) -> list[Result]:
    """Of a cell, those that took turns told at the pace of the ideal of their seed, and the ideal.

    Args:
        results: Of all its runs.
        step_seconds: The ideal's step instead of its own.
    """
    paces = {
        one.job.seed: step_seconds or _step(one)
        for one in results
        if one.is_ideal and one.job.lr_scale == 1
    }
    found = []
    for one in results:
        pace = paces.get(one.job.seed)
        if pace is not None and one.is_ideal:
            points = (replace(point, seconds=point.step * pace) for point in one.points)
            one = replace(one, points=tuple(points))
        elif pace is not None and one.turns:
            one = at_pace(one, pace)
        found.append(one)
    return found


def at_pace(run: Result, step_seconds: float) -> Result:
    """``run`` as on a machine on which a step alone takes ``step_seconds`` throughout.

    The seconds between two evaluations times ``step_seconds`` over what a step alone took, the mean
    of the turns before and after them.
    """
    alone = {turn.step: turn.step_seconds for turn in run.turns}
    points, was, before, now = [], 0, 0.0, 0.0
    for point in run.points:
        taken = point.seconds - before
        now += taken * step_seconds / _between(alone, was, point.step)
        was, before = point.step, point.seconds
        points.append(replace(point, seconds=now))
    return replace(run, points=tuple(points))


def _between(alone: Mapping[int, float], first: int, last: int) -> float:
    return statistics.fmean((alone[first], alone[last]))


def _step(run: Result) -> float:
    return run.seconds / run.points[-1].step


def _uneven(run: Result) -> bool:
    return run.job.slow is not None or run.job.jitter > 0
