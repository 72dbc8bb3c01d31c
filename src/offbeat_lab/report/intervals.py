"""Mean and 95 % confidence interval: a percentile bootstrap over seeds."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MIN_SEEDS = 3
"""Least number of seeds for an interval."""
_RESAMPLES = 10_000


@dataclass(frozen=True)
class Interval:
    """A mean and the ends of its 95 % confidence interval."""

    mean: float
    low: float
    high: float


def interval_of(values: Sequence[float]) -> Interval:
    """Return the mean of ``values``, one per seed, and its interval.

    The ends are the 2.5 % and 97.5 % quantiles of the means of 10,000 resamples with replacement.
    The random generator has a fixed seed, so equal values give equal intervals. With few seeds the
    interval is too narrow: with 3 it is their range.
    """
    if len(values) < MIN_SEEDS:
        raise ValueError(f"an interval needs at least {MIN_SEEDS} values, got {len(values)}")
    drawn = np.random.default_rng(0).integers(len(values), size=(_RESAMPLES, len(values)))
    means = np.asarray(values, dtype=np.float64)[drawn].mean(axis=1)
    low, high = map(float, np.quantile(means, (0.025, 0.975)))
    return Interval(statistics.fmean(values), low, high)
