"""Rows of tables and figures. A row is a method with its runs over the seeds.

The *ideal* is the reference ``ideal``: BSP timed without communication, the speed-up limit.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from offbeat_lab.recipes import ALIASES, RECIPES
from offbeat_lab.results import Result

FAILURES = {
    "diverged": "the model or a metric became NaN or infinite",
    "chance level": "no evaluation was clearly better than random predictions",
    "no progress": "no evaluation was better than the first",
}
"""Marks of runs that did not train, with their meaning."""
DIVERGED, CHANCE_LEVEL, NO_PROGRESS = FAILURES


@dataclass(frozen=True)
class Row:
    """A method (strategy or reference) with its runs over the seeds.

    Attributes:
        name: Strategy or reference with its options, except the options that all rows share.
        runs: Result of each seed.
    """

    name: str
    runs: tuple[Result, ...]

    @property
    def is_ideal(self) -> bool:
        """True if the method is the ideal."""
        return self.runs[0].is_ideal

    @property
    def seconds_to_target(self) -> float | None:
        """Median training seconds to the recipe's target; None if a run did not reach it."""
        known = [s for run in self.runs if (s := run.time_to_target_seconds) is not None]
        return statistics.median(known) if len(known) == len(self.runs) else None


def rows_of(results: Sequence[Result]) -> list[Row]:
    """Return one row per method, in order of appearance."""
    shared = common_options(results)
    runs_of: dict[str, list[Result]] = {}
    for run in results:
        options = [text for text in run.job.options if text not in shared]
        runs_of.setdefault(" ".join([run.strategy, *options]), []).append(run)
    return [Row(name, tuple(runs)) for name, runs in runs_of.items()]


def failure_of(run: Result) -> str | None:
    """Return the key in ``FAILURES`` of a run that did not train, or None.

    A run trained if its best evaluation is better than the level of its start. For a recipe with a
    known ``chance``, this level is 1.3 times chance: a constant prediction is better than chance if
    one class has more samples than others. For other recipes it is the first of at least three
    evaluations.
    """
    if run.diverged:
        return DIVERGED
    sign = 1 if run.higher_is_better else -1
    best = max(sign * point.metric for point in run.points)
    recipe = RECIPES.get(ALIASES.get(run.job.recipe, run.job.recipe))
    if recipe is not None and recipe.chance is not None:
        return CHANCE_LEVEL if best <= 1.3 * recipe.chance else None
    return NO_PROGRESS if len(run.points) >= 3 and best <= sign * run.points[0].metric else None


def failures_in(runs: Sequence[Result]) -> str:
    """Return text such as "diverged" or "1 of 3 diverged"; empty if all runs trained."""
    found = [failure_of(run) for run in runs]
    return ", ".join(
        mark if count == len(runs) else f"{count} of {len(runs)} {mark}"
        for mark in FAILURES
        if (count := found.count(mark))
    )


def common_options(results: Sequence[Result]) -> tuple[str, ...]:
    """Return the options that all results share, such as ``--wire int8``."""
    first, *others = (result.job.options for result in results)
    return tuple(text for text in first if all(text in options for options in others))


def ideal_of(rows: Sequence[Row]) -> Row | None:
    """Return the row of the ideal, or None if there is none."""
    return next((row for row in rows if row.is_ideal), None)


def share_of_ideal(row: Row, rows: Sequence[Row]) -> float | None:
    """Return the ideal's seconds to the recipe's target, divided by the row's; None if unknown."""
    ideal = ideal_of(rows)
    if ideal is None or not ideal.seconds_to_target or not row.seconds_to_target:
        return None
    return ideal.seconds_to_target / row.seconds_to_target


SHARES = (0.95, 0.98, 0.995)
"""Shares of the ideal's final metric that serve as targets for all methods."""


def targets_of(ideal: Row) -> dict[float, float]:
    """Return the target value of the metric for each share in ``SHARES``.

    It is share · m if higher is better, else m / share, where m is the ideal's median final metric.
    If m is not positive there are no targets, because they would be better than m.
    """
    final = statistics.median(run.final for run in ideal.runs)
    if final <= 0:
        return {}
    up = ideal.runs[0].higher_is_better
    return {share: share * final if up else final / share for share in SHARES}
