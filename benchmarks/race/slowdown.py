"""The slowdown of a run against the ideal network.

The *ideal* is the reference ``ideal``, the speed-up limit. The slowdown to a metric is the run's
time until it has this metric, divided by the ideal's time. Both curves are the best metric so far,
with straight lines between evaluations.
"""

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise

from offbeat_lab.report.intervals import MIN_SEEDS, interval_of
from offbeat_lab.results import Result

Corners = Sequence[tuple[float, float]]
"""Corners of a curve: seconds and the best metric so far, negated if lower is better."""


def best_so_far(result: Result) -> Corners:
    """Return the curve of a run."""
    best, corners = -float("inf"), []
    for point in result.points:
        best = max(best, point.metric if result.higher_is_better else -point.metric)
        corners.append((point.seconds, best))
    return corners


def metric_at(corners: Corners, seconds: float) -> float:
    """Return the best metric after some seconds.

    Raises:
        ValueError: The run has no evaluations around that time.
    """
    for (start, low), (end, high) in pairwise(corners):
        if start <= seconds <= end:
            return low + (high - low) * (seconds - start) / (end - start)
    raise ValueError(f"no metric after {seconds:g} s")


def seconds_to(corners: Corners, metric: float) -> float | None:
    """Return the time at which the metric is reached; None if it never is.

    If the first evaluation is good enough already, the result is its time.
    """
    if corners[0][1] >= metric:
        return corners[0][0]
    for (start, low), (end, high) in pairwise(corners):
        if high >= metric:
            return start + (end - start) * (metric - low) / (high - low)
    return None


def slowdown_half_way(run: Result, ideal: Result) -> float | None:
    """Return the slowdown to the ideal's metric after half of its time; None if never reached."""
    return _slowdown(run, ideal, metric_at(best_so_far(ideal), ideal.seconds / 2))


def slowdown_to_share(run: Result, ideal: Result, share: float) -> float | None:
    """Return the slowdown to a share of the ideal's improvement; None if never reached.

    The improvement is what the ideal's metric gains from the first evaluation to the last one.
    """
    first, last = (
        point.metric if ideal.higher_is_better else -point.metric
        for point in (ideal.points[0], ideal.points[-1])
    )
    return _slowdown(run, ideal, first + share * (last - first))


def _slowdown(run: Result, ideal: Result, metric: float) -> float | None:
    arrived, reached = (seconds_to(best_so_far(one), metric) for one in (run, ideal))
    return None if arrived is None or reached is None else arrived / reached


def median(values: Sequence[float | None]) -> float:
    """Return the median of slowdowns; None, a run that never arrives, counts as infinity."""
    return statistics.median(math.inf if one is None else one for one in values)


def summary(values: Sequence[float | None]) -> str:
    """Return slowdowns as text; None stands for a run that never arrives.

    If all runs arrive: the mean, with the 95 % interval in brackets from three values on, or with
    both of two values. Otherwise the number of runs that arrive, and the best one.
    """
    known = [one for one in values if one is not None]
    if not known:
        return "never"
    if len(known) < len(values):
        return f"{len(known)} of {len(values)}, {min(known):.2f} at best"
    text = f"{statistics.fmean(known):.2f}"
    if len(known) >= MIN_SEEDS:
        interval = interval_of(known)
        return f"{text} [{interval.low:.2f}, {interval.high:.2f}]"
    return f"{text} ({min(known):.2f} and {max(known):.2f})" if len(known) == 2 else text
