"""A mean and its 95 % interval by Student's t."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# t of 97.5 % for 1 to 30 degrees of freedom; any table of it.
_T = (
    *(12.706205, 4.302653, 3.182446, 2.776445, 2.570582, 2.446912),
    *(2.364624, 2.306004, 2.262157, 2.228139, 2.200985, 2.178813),
    *(2.160369, 2.144787, 2.131450, 2.119905, 2.109816, 2.100922),
    *(2.093024, 2.085963, 2.079614, 2.073873, 2.068658, 2.063899),
    *(2.059539, 2.055529, 2.051831, 2.048407, 2.045230, 2.042272),
)
_Z = 1.959964


@dataclass(frozen=True)
class Interval:
    """A mean and where it lies with 95 % confidence, if the values are near to normal."""

    mean: float
    low: float
    high: float


def interval_of(values: Sequence[float]) -> Interval:
    """mean ± t·s/√n.

    Raises:
        ValueError: fewer than two values: they have no spread.
    """
    if len(values) < 2:
        raise ValueError(f"an interval needs at least two values, got {len(values)}")
    mean = statistics.fmean(values)
    half = t_quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


def t_quantile(degrees: int) -> float:
    """The 97.5 % quantile of Student's t; beyond 30 degrees by its expansion about the normal."""
    if degrees <= len(_T):
        return _T[degrees - 1]
    return _Z + (_Z**3 + _Z) / (4 * degrees) + (5 * _Z**5 + 16 * _Z**3 + 3 * _Z) / (96 * degrees**2)
