"""The slowdown of a run against the ideal network.

The slowdown after s seconds is the run's time to a metric over the ideal network's time to it; the
metric is the one that the ideal network has after s seconds. Both curves are the best metric so
far, with straight lines between evaluations.
"""

import statistics
from collections.abc import Iterator, Sequence

from offbeat.lab.report.intervals import interval_of

Points = Sequence[tuple[float, float]]
"""Training seconds and metric of each evaluation, in order."""


def best_so_far(points: Points, *, lower_is_better: bool) -> list[tuple[float, float]]:
    """Return the corners of the curve; the sign of a metric changes if lower is better."""
    best, corners = -float("inf"), []
    for seconds, metric in points:
        best = max(best, -metric if lower_is_better else metric)
        corners.append((seconds, best))
    return corners


def metric_at(corners: Points, seconds: float) -> float | None:
    """Return the best metric after some seconds; None outside of the evaluations."""
    for (start, low), (end, high) in _pieces(corners):
        if start <= seconds <= end:
            return low + (high - low) * (seconds - start) / (end - start)
    return None


def seconds_to(corners: Points, metric: float) -> float | None:
    """Return the time at which the metric is reached; None if it never is.

    If the first evaluation is good enough already, the result is its time.
    """
    if corners[0][1] >= metric:
        return corners[0][0]
    for (start, low), (end, high) in _pieces(corners):
        if high >= metric:
            return start + (end - start) * (metric - low) / (high - low)
    return None


def slowdown(
    points: Points, ideal: Points, seconds: float, *, lower_is_better: bool
) -> float | None:
    """Return the slowdown after so many seconds of the ideal network; None if never reached."""
    fast, slow = (best_so_far(one, lower_is_better=lower_is_better) for one in (ideal, points))
    target = metric_at(fast, seconds)
    if target is None:
        raise ValueError(f"the ideal has no metric after {seconds:g} s")
    reached, arrived = seconds_to(fast, target), seconds_to(slow, target)
    return None if arrived is None or reached is None else arrived / reached


def _pieces(corners: Points) -> Iterator[tuple[tuple[float, float], tuple[float, float]]]:
    for i in range(len(corners) - 1):
        yield corners[i], corners[i + 1]


def summary(values: Sequence[float | None]) -> str:
    """Return the mean of the values as text; None stands for a run that never arrived.

    With two values their range follows, with more the 95 % interval in brackets. If some
    runs never arrived, the number of those that did follows.
    """
    known = [one for one in values if one is not None]
    if not known:
        return "never"
    text = f"{statistics.fmean(known):.2f}"
    if len(known) == 2:
        text += f" ({min(known):.2f}–{max(known):.2f})"
    elif len(known) > 2:
        interval = interval_of(known)
        text += f" [{interval.low:.2f}, {interval.high:.2f}]"
    return text if len(known) == len(values) else f"{text}, {len(known)} of {len(values)}"
