"""How many times as long as the ideal a run takes to the metric that the ideal has by then.

Both curves are the best metric so far, straight between evaluations.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence

from offbeat.lab.report.intervals import interval_of

Points = Sequence[tuple[float, float]]
"""Training seconds and metric of each evaluation, in order."""


def best_so_far(points: Points, *, less: bool) -> list[tuple[float, float]]:
    """Corners of the curve; a metric of which less is better changes its sign."""
    best, corners = -float("inf"), []
    for seconds, metric in points:
        best = max(best, -metric if less else metric)
        corners.append((seconds, best))
    return corners


def metric_at(corners: Points, seconds: float) -> float | None:
    """The best metric after so many seconds; None before the first evaluation or past the last."""
    for (start, low), (end, high) in _pieces(corners):
        if start <= seconds <= end:
            return low + (high - low) * (seconds - start) / (end - start)
    return None


def seconds_to(corners: Points, metric: float) -> float | None:
    """When the metric is first as good; None: never. Before the first evaluation: at that."""
    if corners[0][1] >= metric:
        return corners[0][0]
    for (start, low), (end, high) in _pieces(corners):
        if high >= metric:
            return start + (end - start) * (metric - low) / (high - low)
    return None


def lateness(points: Points, ideal: Points, seconds: float, *, less: bool) -> float | None:
    """The run's time over the ideal's, to what the ideal has after ``seconds``; None: never."""
    fast, slow = (best_so_far(one, less=less) for one in (ideal, points))
    target = metric_at(fast, seconds)
    if target is None:
        raise ValueError(f"the ideal has no metric after {seconds:g} s")
    reached, arrived = seconds_to(fast, target), seconds_to(slow, target)
    return None if arrived is None or reached is None else arrived / reached


def _pieces(corners: Points) -> Iterator[tuple[tuple[float, float], tuple[float, float]]]:
    for i in range(len(corners) - 1):
        yield corners[i], corners[i + 1]


def summary(found: Sequence[float | None]) -> str:
    """The mean and its range, of three or more half its 95 % interval; how many arrived."""
    there = [one for one in found if one is not None]
    if not there:
        return "never"
    text = f"{statistics.fmean(there):.2f}"
    if len(there) == 2:
        text += f" ({min(there):.2f}–{max(there):.2f})"
    elif len(there) > 2:
        found_interval = interval_of(there)
        text += f" ± {found_interval.high - found_interval.mean:.2f}"
    return text if len(there) == len(found) else f"{text}, {len(there)} of {len(found)}"


def table(
    runs: Mapping[str, Mapping[int, Points]],
    ideals: Mapping[int, Points],
    seconds: Sequence[float],
    *,
    less: bool,
) -> list[list[str]]:
    """A row a method: its name, and its lateness at each of the ``seconds``, over the seeds.

    Args:
        runs: Method → seed → points.
        ideals: Seed → points.
        seconds: Of the ideal.
        less: Whether less of the metric is better.
    """
    return [
        [
            name,
            *(
                summary([lateness(one, ideals[seed], at, less=less) for seed, one in seeds.items()])
                for at in seconds
            ),
        ]
        for name, seeds in runs.items()
    ]
