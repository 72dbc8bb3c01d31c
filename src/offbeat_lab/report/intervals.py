"""Mean and 95 % confidence interval of a few values, by Student's t."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

MIN_SEEDS = 3
"""Least number of seeds for an interval."""
_QUANTILES = (4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201)
"""97.5 % quantiles of Student's t for 2, 3, … degrees of freedom."""


@dataclass(frozen=True)
class Interval:
    """A mean and the ends of its 95 % confidence interval."""

    mean: float
    low: float
    high: float


def interval_of(values: Sequence[float]) -> Interval:
    """Return the mean of ``values``, one per seed, and its interval.

    The ends are the mean ± t·s/√n, with the standard deviation s and the quantile t of n − 1
    degrees of freedom.
    """
    if len(values) < MIN_SEEDS:
        raise ValueError(f"an interval needs at least {MIN_SEEDS} values, got {len(values)}")
    freedom = len(values) - 1
    known = _QUANTILES[freedom - 2 : freedom - 1]
    quantile = known[0] if known else 1.960 + 2.372 / freedom + 2.823 / freedom**2
    mean = statistics.fmean(values)
    half = quantile * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)
