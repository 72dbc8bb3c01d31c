"""Correction of times for a machine whose speed changes while the runs take place."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

from offbeat.lab.results import Result


def took_turns(results: Sequence[Result]) -> bool:
    """Return True if a run measured step times in turn (see ``lab/step_time.py``)."""
    return any(run.turns for run in results)


def on_one_clock(results: Sequence[Result], step_seconds: float | None = None) -> list[Result]:
    """Scale the times of runs with turns to a machine of constant speed.

    The constant is the time of a step alone, one per seed: that of the ideal's run with the seed,
    or without an ideal the mean of all turns with the seed. The ideal's times become steps × that
    constant. Other runs without turns are unchanged. The function is idempotent.

    Args:
        results: Results of one comparison.
        step_seconds: Time of a step alone for all seeds, instead of one per seed.
    """
    by_seed = _step_seconds(results) if took_turns(results) else {}
    scaled = []
    for run in results:
        seconds = step_seconds or by_seed.get(run.job.seed)
        if run.is_ideal and seconds is not None:
            points = (replace(point, seconds=point.step * seconds) for point in run.points)
            run = replace(run, points=tuple(points))
        elif run.turns and seconds is not None:
            run = at_pace(run, seconds)
        scaled.append(run)
    return scaled


def _step_seconds(results: Sequence[Result]) -> dict[int, float]:
    """Return the time of a step alone by seed."""
    turns: dict[int, list[float]] = {}
    for run in results:
        turns.setdefault(run.job.seed, []).extend(turn.step_seconds for turn in run.turns)
    by_seed = {seed: statistics.fmean(times) for seed, times in turns.items() if times}
    ideals = [run for run in results if run.is_ideal]
    # Of several learning rates, the nearest to the recipe's comes last and wins.
    for run in sorted(ideals, key=lambda run: abs(math.log(run.job.lr_scale)), reverse=True):
        by_seed[run.job.seed] = step_of(run)
    return by_seed


def at_pace(run: Result, step_seconds: float) -> Result:
    """Scale a run to a machine on which a step alone always takes ``step_seconds``.

    The time between two evaluations is multiplied by ``step_seconds`` / a, where a is the mean time
    of a step alone in the turns at both evaluations.
    """
    alone = {turn.step: turn.step_seconds for turn in run.turns}
    points, last_step, last_seconds, now = [], 0, 0.0, 0.0
    for point in run.points:
        around = statistics.fmean((alone[last_step], alone[point.step]))
        now += (point.seconds - last_seconds) * step_seconds / around
        last_step, last_seconds = point.step, point.seconds
        points.append(replace(point, seconds=now))
    turns = (replace(turn, step_seconds=step_seconds) for turn in run.turns)
    return replace(run, points=tuple(points), turns=tuple(turns))


def step_of(run: Result) -> float:
    """Return the mean seconds of a step over the whole run."""
    return run.seconds / run.points[-1].step
