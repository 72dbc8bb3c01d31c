"""Old results only: times on one clock, for a machine whose speed changed during a comparison.

Earlier versions did not control step times. Instead, at each evaluation the workers of a run
trained alone for a second. The file of results has the local step times of these calibrations as
"turns". This module rescales the times of such runs as if the local step time had been that of the
ideal network's own run. New runs have padded steps (``Job.step_seconds``), which need no rescaling.
"""

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from offbeat.lab.results import Result, read_results


@dataclass(frozen=True, kw_only=True)
class CalibratedResult(Result):
    """An old result. ``turns`` is pairs of the number of steps and the local step time then."""

    turns: tuple[tuple[int, float], ...]


def read(path: Path) -> list[Result]:
    """Return the results in a file, those with turns as ``CalibratedResult``."""
    found: list[Result] = []
    lines = path.read_text(encoding="utf-8").splitlines()
    for line, result in zip(lines, read_results(path), strict=True):
        turns = [(turn["step"], turn["step_seconds"]) for turn in json.loads(line).get("turns", ())]
        if turns:
            values = {field.name: getattr(result, field.name) for field in fields(Result)}
            result = CalibratedResult(**values, turns=tuple(turns))
        found.append(result)
    return found


def has_known_speed(run: Result) -> bool:
    """Return True if the time of a step is controlled, calibrated, or the ideal network's."""
    return run.is_ideal or run.job.step_seconds is not None or isinstance(run, CalibratedResult)


def on_one_clock(results: Sequence[Result], step_seconds: float | None = None) -> list[Result]:
    """Rescale the times of calibrated runs, and of the ideal, to a machine of constant speed.

    Other runs do not change. If no run is calibrated and ``step_seconds`` is None, nothing changes.

    Args:
        results: Results of one comparison.
        step_seconds: Local step time to which the runs of all seeds are rescaled. None: for each
            seed the step time of the ideal.
    """
    by_seed: dict[int, float] = {}
    if any(isinstance(run, CalibratedResult) for run in results):
        ideals = [run for run in results if run.is_ideal]
        # The ideal may have run with several factors on the learning rate. The run whose factor is
        # nearest to 1 comes last, so its step time counts.
        for run in sorted(ideals, key=lambda run: abs(math.log(run.job.lr_scale)), reverse=True):
            by_seed[run.job.seed] = run.mean_step_seconds
    scaled = []
    for run in results:
        seconds = step_seconds or by_seed.get(run.job.seed)
        if run.is_ideal and seconds is not None:
            points = (replace(point, seconds=point.step * seconds) for point in run.points)
            run = replace(run, points=tuple(points))
        elif isinstance(run, CalibratedResult) and seconds is not None:
            run = at_constant_speed(run, seconds)
        scaled.append(run)
    return scaled


def at_constant_speed(run: CalibratedResult, step_seconds: float) -> Result:
    """Rescale a calibrated run to a machine whose local step time is always ``step_seconds``.

    Between two calibrations, the time is multiplied by ``step_seconds`` / a, where a is the mean of
    the two measured local step times.
    """
    measured = dict(run.turns)
    points, last_step, last_seconds, now = [], 0, 0.0, 0.0
    for point in run.points:
        around = statistics.fmean((measured[last_step], measured[point.step]))
        now += (point.seconds - last_seconds) * step_seconds / around
        last_step, last_seconds = point.step, point.seconds
        points.append(replace(point, seconds=now))
    return replace(run, points=tuple(points))
