"""The slowdown of a run against the ideal network.

The *ideal* is the reference ``ideal``, the speed-up limit. The slowdown to a metric is the run's
time until it has this metric, divided by the ideal's time.
"""

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise

from offbeat_lab.report.intervals import MIN_SEEDS, interval_of
from offbeat_lab.results import Result


def slowdown_half_way(run: Result, ideal: Result) -> float | None:
    """Return the slowdown to the ideal's metric after half of its time; None if never reached."""
    best = _after(ideal, ideal.seconds / 2)
    return _slowdown(run, ideal, best if ideal.higher_is_better else -best)


def _after(run: Result, seconds: float) -> float:
    """Return the best metric so far after some seconds, negated if lower is better.

    Raises:
        ValueError: The run has no evaluations around that time.
    """
    for (start, low), (end, high) in pairwise(run.best_so_far()):
        if start <= seconds <= end:
            return low + (high - low) * (seconds - start) / (end - start)
    raise ValueError(f"no metric after {seconds:g} s")


def slowdown_to_share(run: Result, ideal: Result, share: float) -> float | None:
    """Return the slowdown to a share of the ideal's improvement; None if never reached."""
    return _slowdown(run, ideal, ideal.gained(share))


def _slowdown(run: Result, ideal: Result, metric: float) -> float | None:
    arrived, reached = run.seconds_to(metric), ideal.seconds_to(metric)
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
