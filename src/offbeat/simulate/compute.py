"""Compute time of one step of one worker: a pure function of (rank, step, seed), and of the time.

The time matters only with ``Compute.changes``: the speed of a worker may change during a run.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from offbeat.arguments import Range, require_integer, require_mapping, require_number
from offbeat.units import to_seconds

_FACTOR = Range(above=0, hint="2: twice as slow")
_NOT_NEGATIVE = Range(least=0)
_MOST_JITTER = 1e6
# Separates the jitter from other random generators with the same seed. It is "jitt" in ASCII.
_JITTER = 0x6A697474


def _require_factor(name: str, value: float) -> None:
    require_number(name, value, _FACTOR)


@dataclass(frozen=True)
class Straggler:
    """A worker that is slow for some steps.

    Args:
        rank: Rank of the worker (≥ 0).
        first_step: Number of the first slow step, from 0 (≥ 0).
        steps: Number of slow steps (≥ 1).
        factor: Factor on the compute time of these steps (> 0; 2 means twice as slow).

    Raises:
        TypeError, ValueError: An argument has the wrong type or is out of its range.
    """

    rank: int
    first_step: int
    steps: int
    factor: float

    def __post_init__(self) -> None:
        require_integer("rank", self.rank, least=0)
        require_integer("first_step", self.first_step, least=0)
        require_integer("steps", self.steps, least=1)
        _require_factor("factor", self.factor)


@dataclass(frozen=True, init=False)
class Compute:
    """Compute time of every step of every worker, in the simulator's virtual time.

    Example: ``Compute("50ms", jitter=0.1, slowdown={3: 2.0})``. The attributes hold the arguments,
    with all times in seconds.

        seconds = (trace or step) · slowdown of the rank · factors of stragglers · random factor

    The random factor has a log-normal distribution of mean 1 and standard deviation c. It is
    exp(σz − σ²/2) with σ² = ln(1 + c²). z is standard normal, and independent for every rank and
    step.

    Args:
        step: Compute time of a step: text like "50ms", or seconds (> 0).
        jitter: Standard deviation c of the random factor (0 to 1e6). 0 disables the factor.
        slowdown: Factors on the compute time of all steps, by rank (> 0; 2 means twice as slow).
        stragglers: Temporary slowdowns; a single ``Straggler`` is accepted. If several cover the
            same step of a worker, their factors are multiplied.
        trace: Measured compute times of consecutive steps (text or seconds), used in place of
            ``step``. The sequence repeats when it ends. A mapping gives each rank its own sequence.
            Ranks without a sequence use ``step``.
        changes: Further factors on the compute time of some workers (> 0), by the virtual time from
            which they hold and by rank. ``{"20s": {2: 2.0}, "40s": {2: 1.0}}`` makes worker 2 twice
            as slow from 20 s to 40 s. What a worker computes at that moment keeps its duration.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: A unit is unknown, a number is out of its range, or a trace is empty.
    """

    step: float
    jitter: float
    slowdown: dict[int, float] = field(hash=False)
    stragglers: tuple[Straggler, ...]
    trace: tuple[float, ...] | dict[int, tuple[float, ...]] | None = field(hash=False, repr=False)
    changes: dict[float, dict[int, float]] = field(hash=False)

    def __init__(
        self,
        step: str | float = "50ms",
        *,
        jitter: float = 0.0,
        slowdown: Mapping[int, float] = {},
        stragglers: Iterable[Straggler] = (),
        trace: Iterable[float] | Mapping[int, Iterable[float]] | None = None,
        changes: Mapping[str | float, Mapping[int, float]] = {},
    ) -> None:
        require_number("jitter", jitter, _NOT_NEGATIVE)
        if jitter > _MOST_JITTER:
            raise ValueError(f"jitter must be at most {_MOST_JITTER:g}, got {jitter}")
        stragglers = tuple(stragglers) if isinstance(stragglers, Iterable) else (stragglers,)
        for straggler in stragglers:
            if not isinstance(straggler, Straggler):
                raise TypeError(
                    "stragglers must be a sequence of Straggler(rank, first_step, steps, factor), "
                    f"got {straggler!r}"
                )
        values = {
            "step": to_seconds(step),
            "jitter": float(jitter),
            "slowdown": _read_factors("slowdown", slowdown),
            "stragglers": stragglers,
            "trace": _read_trace(trace),
            "changes": _read_changes(changes),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def ranks(self) -> set[int]:
        """Return the ranks named in ``slowdown``, ``stragglers``, ``trace`` and ``changes``."""
        traced = self.trace if isinstance(self.trace, dict) else ()
        stragglers = (straggler.rank for straggler in self.stragglers)
        return {*self.slowdown, *traced, *stragglers}.union(*self.changes.values())

    def seconds(self, rank: int, step: int, seed: int) -> float:
        """Return the compute time of worker ``rank`` in step ``step`` (from 0), in seconds.

        The same arguments give the same seconds in every process. The factors in ``changes`` are
        not included; see ``factor_at``.
        """
        require_integer("rank", rank, least=0)
        require_integer("step", step, least=0)
        require_integer("seed", seed, least=0)
        trace = self.trace.get(rank) if isinstance(self.trace, dict) else self.trace
        seconds = trace[step % len(trace)] if trace else self.step
        seconds *= self.slowdown.get(rank, 1.0)
        for straggler in self.stragglers:
            if straggler.rank == rank and 0 <= step - straggler.first_step < straggler.steps:
                seconds *= straggler.factor
        return seconds * self._jitter_factor(rank, step, seed)

    def factor_at(self, rank: int, now: float) -> float:
        """Return the factor in ``changes`` that holds for worker ``rank`` at virtual time ``now``.

        1 before the first change.
        """
        factor = 1.0
        for since, factors in self.changes.items():
            if since <= now:
                factor = factors.get(rank, factor)
        return factor

    def _jitter_factor(self, rank: int, step: int, seed: int) -> float:
        if self.jitter == 0:
            return 1.0
        normal = float(np.random.default_rng([seed, _JITTER, rank, step]).standard_normal())
        variance = math.log1p(self.jitter**2)
        return math.exp(math.sqrt(variance) * normal - variance / 2)


def _read_factors(name: str, factors: Mapping[int, float]) -> dict[int, float]:
    require_mapping(name, factors)
    for rank, factor in factors.items():
        require_integer(f"a rank in {name}", rank, least=0)
        _require_factor(f"{name}[{rank}]", factor)
    return {rank: float(factors[rank]) for rank in sorted(factors)}


def _read_changes(
    changes: Mapping[str | float, Mapping[int, float]],
) -> dict[float, dict[int, float]]:
    if not isinstance(changes, Mapping):
        raise TypeError(f"changes must be a dictionary by virtual time, got {changes!r}")
    read = {
        to_seconds(seconds, allow_zero=True): _read_factors(f"changes[{seconds!r}]", factors)
        for seconds, factors in changes.items()
    }
    return {seconds: read[seconds] for seconds in sorted(read)}


def _read_trace(
    trace: Iterable[float] | Mapping[int, Iterable[float]] | None,
) -> tuple[float, ...] | dict[int, tuple[float, ...]] | None:
    if trace is None:
        return None
    if not isinstance(trace, Mapping):
        return _read_steps("trace", trace)
    if not trace:
        raise ValueError("trace must hold at least one rank; leave it out to take step")
    for rank in trace:
        require_integer("a rank in trace", rank, least=0)
    return {rank: _read_steps(f"trace[{rank}]", trace[rank]) for rank in sorted(trace)}


def _read_steps(name: str, measured: Iterable[float]) -> tuple[float, ...]:
    if isinstance(measured, str) or not isinstance(measured, Iterable):
        raise TypeError(f"{name} must be a sequence of seconds, got {measured!r}")
    steps = tuple(to_seconds(seconds) for seconds in measured)
    if not steps:
        raise ValueError(f"{name} must hold at least one step")
    return steps
