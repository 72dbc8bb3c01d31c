"""Correction of times for a machine whose speed changes during a comparison.

The *local step time* is the time of a training step without communication. A *calibrated* run
measured it before the training and at each evaluation (``Result.turns``). This module rescales the
times of such a run as if the local step time had been constant. The *ideal* is the baseline
``ideal``: BSP timed without communication.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

from offbeat.lab.results import Result


def is_calibrated(results: Sequence[Result]) -> bool:
    """Return True if at least one run is calibrated."""
    return any(run.turns for run in results)


def on_one_clock(results: Sequence[Result], step_seconds: float | None = None) -> list[Result]:
    """Rescale the times of calibrated runs, and of the ideal, to a machine of constant speed.

    Other runs do not change. If no run is calibrated and ``step_seconds`` is None, nothing changes.

    Args:
        results: Results of one comparison.
        step_seconds: Local step time to which the runs of all seeds are rescaled. None: for each
            seed the step time of the ideal or, without the ideal, the mean over all calibrations.
    """
    by_seed = _step_seconds(results) if is_calibrated(results) else {}
    scaled = []
    for run in results:
        seconds = step_seconds or by_seed.get(run.job.seed)
        if run.is_ideal and seconds is not None:
            points = (replace(point, seconds=point.step * seconds) for point in run.points)
            run = replace(run, points=tuple(points))
        elif run.turns and seconds is not None:
            run = at_constant_speed(run, seconds)
        scaled.append(run)
    return scaled


def _step_seconds(results: Sequence[Result]) -> dict[int, float]:
    """Return the local step time to which the runs of each seed are rescaled."""
    turns: dict[int, list[float]] = {}
    for run in results:
        turns.setdefault(run.job.seed, []).extend(turn.step_seconds for turn in run.turns)
    by_seed = {seed: statistics.fmean(times) for seed, times in turns.items() if times}
    ideals = [run for run in results if run.is_ideal]
    # The ideal may have run with several factors on the learning rate. The run whose factor is
    # nearest to 1 comes last, so its step time counts.
    for run in sorted(ideals, key=lambda run: abs(math.log(run.job.lr_scale)), reverse=True):
        by_seed[run.job.seed] = step_of(run)
    return by_seed


def at_constant_speed(run: Result, step_seconds: float) -> Result:
    """Rescale a calibrated run to a machine whose local step time is always ``step_seconds``.

    Between two calibrations, the time is multiplied by ``step_seconds`` / a, where a is the mean of
    the two measured local step times.
    """
    measured = {turn.step: turn.step_seconds for turn in run.turns}
    points, last_step, last_seconds, now = [], 0, 0.0, 0.0
    for point in run.points:
        around = statistics.fmean((measured[last_step], measured[point.step]))
        now += (point.seconds - last_seconds) * step_seconds / around
        last_step, last_seconds = point.step, point.seconds
        points.append(replace(point, seconds=now))
    turns = (replace(turn, step_seconds=step_seconds) for turn in run.turns)
    return replace(run, points=tuple(points), turns=tuple(turns))


def step_of(run: Result) -> float:
    """Return the mean duration of a step over the whole run, in seconds."""
    return run.seconds / run.points[-1].step
