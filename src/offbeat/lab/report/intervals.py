"""Mean and 95 % confidence interval by Student's t."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# 97.5 % quantiles of Student's t for 1 to 30 degrees of freedom, from a table.
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
    """A mean and the ends of its 95 % confidence interval."""

    mean: float
    low: float
    high: float


def interval_of(values: Sequence[float]) -> Interval:
    """Return mean ± t·s/√n for n approximately normal values with standard deviation s.

    Here t is ``t_quantile(n - 1)``. Raises ValueError if n < 2.
    """
    if len(values) < 2:
        raise ValueError(f"an interval needs at least two values, got {len(values)}")
    mean = statistics.fmean(values)
    half = t_quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


def t_quantile(degrees: int) -> float:
    """Return the 97.5 % quantile of Student's t with this number of degrees of freedom.

    Above 30 degrees of freedom it is an asymptotic expansion (Abramowitz & Stegun, 26.7.5).
    """
    if degrees <= len(_T):
        return _T[degrees - 1]
    return _Z + (_Z**3 + _Z) / (4 * degrees) + (5 * _Z**5 + 16 * _Z**3 + 3 * _Z) / (96 * degrees**2)
