"""One clock for all runs of a comparison, on a machine whose speed moves while they run."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from offbeat.lab.results import Result


def took_turns(results: Sequence[Result]) -> bool:
    """Whether any run trained alone by turns (``lab.step_time``)."""
    return any(one.turns for one in results)


def on_one_clock(results: Sequence[Result], step_seconds: float | None = None) -> list[Result]:
    """The results, those that took turns told as on a machine of one speed; the others as they are.

    Under each seed that is the speed at which a step alone takes what it took in the ideal's run,
    whose own clock that is (steps · time of a step alone); without an ideal under that seed, the
    mean of all turns that were taken under it. Told twice is told the same.

    Args:
        results: Of one comparison.
        step_seconds: What a step alone takes, in place of that; for the ideal, too.
    """
    paces = {} if not took_turns(results) else _paces(results)
    found = []
    for one in results:
        pace = step_seconds or paces.get(one.job.seed)
        if one.is_ideal and pace is not None:
            points = (replace(point, seconds=point.step * pace) for point in one.points)
            one = replace(one, points=tuple(points))
        elif one.turns and pace is not None:
            one = at_pace(one, pace)
        found.append(one)
    return found


def _paces(results: Sequence[Result]) -> dict[int, float]:
    """Seed → what a step alone takes."""
    turns: dict[int, list[float]] = {}
    for one in results:
        turns.setdefault(one.job.seed, []).extend(turn.step_seconds for turn in one.turns)
    found = {seed: statistics.fmean(of) for seed, of in turns.items() if of}
    ideals = [one for one in results if one.is_ideal]
    for one in sorted(ideals, key=lambda run: abs(math.log(run.job.lr_scale)), reverse=True):
        found[one.job.seed] = step_of(one)  # of several rates that at the recipe's own is left
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
    turns = (replace(turn, step_seconds=step_seconds) for turn in run.turns)
    return replace(run, points=tuple(points), turns=tuple(turns))


def _between(alone: Mapping[int, float], first: int, last: int) -> float:
    return statistics.fmean((alone[first], alone[last]))


def step_of(run: Result) -> float:
    """Seconds of a step, over the whole run."""
    return run.seconds / run.points[-1].step
