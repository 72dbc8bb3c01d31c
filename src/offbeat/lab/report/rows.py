"""What the rows of every table and figure are: a method, and its runs over the seeds."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from offbeat.lab.report.clock import on_one_clock
from offbeat.lab.results import Result

_FACTOR = "--lr-scale "


@dataclass(frozen=True)
class Row:
    """A method with its options, over its seeds.

    Attributes:
        name: Strategy and options that not all rows have.
        runs: One a seed; of a method that was tried with several factors on the learning rate,
            those of the best one.
        tried: How many runs the method took, all factors and seeds together.
        lr_scale: The factor that was chosen; None if there was no choice.
        at_edge: Whether it is the smallest or largest that was tried, so that a better one may lie
            beyond.
    """

    name: str
    runs: tuple[Result, ...]
    tried: int
    lr_scale: float | None = None
    at_edge: bool = False

    @property
    def is_ideal(self) -> bool:
        """Whether this is the run on an infinitely fast network."""
        return self.runs[0].is_ideal

    @property
    def arrival(self) -> float | None:
        """Median seconds to the target; None if one run did not reach it."""
        times = [run.time_to_target_seconds for run in self.runs]
        known = [seconds for seconds in times if seconds is not None]
        return statistics.median(known) if len(known) == len(times) else None


def rows_of(results: Sequence[Result]) -> list[Row]:
    """The rows, in order of appearance, their seconds on one clock.

    Of several factors on the learning rate the one is chosen whose mean final metric over the seeds
    is best; of equal ones the nearest to 1. Factors that not all seeds have seen do not count.
    """
    results = on_one_clock(results)
    shared = common_options(results)
    tuned: dict[str, set[float]] = {}
    for one in results:
        tuned.setdefault(_method(one), set()).update(one.lr_scales)
    found: dict[str, list[Result]] = {}
    for one in results:
        free = one.job.lr_scale in tuned[_method(one)]
        options = [text for text in one.job.options if text not in shared]
        own = [text for text in options if not (free and text.startswith(_FACTOR))]
        found.setdefault(" ".join([one.strategy, *own]), []).append(one)
    return [_row(name, runs, tuned[_method(runs[0])]) for name, runs in found.items()]


def _method(result: Result) -> str:
    """Strategy and options, the factor on the learning rate apart."""
    own = [text for text in result.job.options if not text.startswith(_FACTOR)]
    return " ".join([result.strategy, *own])


def _row(name: str, runs: list[Result], scales: set[float]) -> Row:
    by_scale: dict[float, list[Result]] = {}
    for run in runs:
        by_scale.setdefault(run.job.lr_scale, []).append(run)
    if len(by_scale) < 2 and len(scales) < 2:
        return Row(name, tuple(runs), len(runs))
    most = max(map(len, by_scale.values()))
    whole = {scale: of for scale, of in by_scale.items() if len(of) == most}
    best = max(whole, key=lambda scale: (_score(whole[scale]), -abs(math.log(scale))))
    edge = best in (min(by_scale), max(by_scale))
    return Row(name, tuple(whole[best]), len(runs), best, edge)


def _score(runs: Sequence[Result]) -> float:
    """The mean final metric, larger is better; one that is no number is the worst."""
    finals = [run.final if run.higher_is_better else -run.final for run in runs]
    return statistics.fmean(finals) if all(map(math.isfinite, finals)) else -math.inf


def groups(results: Sequence[Result]) -> dict[str, list[Result]]:
    """The runs of each row, by its name."""
    return {row.name: list(row.runs) for row in rows_of(results)}


def common_options(results: Sequence[Result]) -> tuple[str, ...]:
    """The options of the method that all results have, as ``--wire int8``."""
    first, *others = (result.job.options for result in results)
    kept = tuple(one for one in first if all(one in options for options in others))
    if any(result.lr_scales for result in results):
        return tuple(one for one in kept if not one.startswith(_FACTOR))
    return kept


def ideal_of(rows: Sequence[Row]) -> Row | None:
    """The row of the ideal, if it was run."""
    return next((row for row in rows if row.is_ideal), None)


def share_of_ideal(row: Row, rows: Sequence[Row]) -> float | None:
    """The ideal's time to the target over that of ``row``; None if one is not known."""
    ideal = ideal_of(rows)
    if ideal is None or not ideal.arrival or not row.arrival:
        return None
    return ideal.arrival / row.arrival
