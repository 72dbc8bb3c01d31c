"""Compute time of one step of one worker: a pure function of rank, step, virtual time and seed."""

import math
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field

import numpy as np

from offbeat.arguments import Range, require_integer, require_number
from offbeat.units import to_seconds

_FACTOR = Range(above=0, hint="2: twice as slow")
_JITTER_RANGE = Range(least=0, most=1e6)
# Separates the jitter from other random generators with the same seed. It is "jitt" in ASCII.
_JITTER = 0x6A697474


@dataclass(frozen=True)
class Compute:
    """Compute time of every step of every worker, in the simulator's virtual time.

    Example: ``Compute("50ms", jitter=0.1, slowdown={3: 2.0})``.

        seconds = step · slowdown · random factor

    The random factor has a log-normal distribution of mean 1 and standard deviation c. It is
    exp(σz − σ²/2) with σ² = ln(1 + c²). z is standard normal, and independent for every rank and
    step.

    Args:
        step: Compute time of a step: text like "50ms", or seconds (> 0).
        jitter: Standard deviation c of the random factor (0 to 1e6). 0 disables the factor.
        slowdown: Factor on the compute time (> 0; 2 means twice as slow): by rank, or a function of
            rank, number of the step (from 0) and virtual time in seconds. This function makes
            worker 2 slow for three steps:
            ``lambda rank, step, seconds: 5.0 if rank == 2 and 10 <= step < 13 else 1.0``.
            The factor at the beginning of a step holds for the whole step.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: A unit is unknown, or a number is out of its range.
    """

    step: str | float = "50ms"
    _: KW_ONLY
    jitter: float = 0.0
    slowdown: Mapping[int, float] | Callable[[int, int, float], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "step", to_seconds(self.step))
        require_number("jitter", self.jitter, _JITTER_RANGE)
        if callable(self.slowdown):
            return
        if not isinstance(self.slowdown, Mapping):
            raise TypeError(f"slowdown must be a dictionary or a function, got {self.slowdown!r}")
        for rank, factor in self.slowdown.items():
            require_integer("a rank in slowdown", rank, least=0)
            require_number(f"slowdown[{rank}]", factor, _FACTOR)

    def seconds(self, rank: int, step: int, now: float, seed: int) -> float:
        """Return the compute time of step ``step`` (from 0), if worker ``rank`` starts it ``now``.

        The same arguments give the same seconds in every process.
        """
        if callable(self.slowdown):
            factor = self.slowdown(rank, step, now)
            require_number(f"slowdown({rank}, {step}, {now:g})", factor, _FACTOR)
        else:
            factor = self.slowdown.get(rank, 1.0)
        return float(self.step) * factor * self._jitter_factor(rank, step, seed)

    def _jitter_factor(self, rank: int, step: int, seed: int) -> float:
        if self.jitter == 0:
            return 1.0
        normal = float(np.random.default_rng([seed, _JITTER, rank, step]).standard_normal())
        variance = math.log1p(self.jitter**2)
        return math.exp(math.sqrt(variance) * normal - variance / 2)
