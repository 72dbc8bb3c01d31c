"""The default strategies of a plan. A few simulated runs determine the settings of some of them.

The *idle share* of a run is the share of the time that a worker waits for others. The *staleness*
of a strategy is the largest age of the newest mean in a worker's model, in steps.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from offbeat.plan.forecast import Measured, measure
from offbeat.plan.run import Setting
from offbeat.quantization.wire import Precision
from offbeat.strategies import (
    BSP,
    AsyncAveraging,
    LocalSGD,
    SelSync,
    Strategy,
    StreamingAveraging,
)

IDLE_LIMIT = 0.05
"""Largest idle share that the search for a setting accepts."""
SHORT_PERIOD = 8
"""Period of LocalSGD with which to start, according to docs/strategies.md."""

_EAGER_BOUND = 16  # least staleness bound suggested for the eager schedule
_MARGIN = 1.25  # with jitter: factor on the staleness that a run has reached
_UNBOUNDED = 10**9
_GROWTH = 1.25  # least factor from one staleness to the next in a search
_RUNS = 5  # limit of the values tried in a search, after the first one for LocalSGD
_TINY = 1e-6  # rounding error of an idle share
_NOISE = 0.003  # with jitter: statistical error of an idle share


def evaluate(
    strategy: Strategy, wire: Precision | None, setting: Setting, text: str | None = None
) -> Measured:
    """Simulate ``strategy`` and return its forecast. ``wire=None`` means the strategy's default."""
    return measure(strategy, wire or strategy.default_wire, setting, text=text)


def suggestions(wire: Precision | None, setting: Setting) -> Iterator[Measured]:
    """Yield the forecasts of the default strategies, which ``offbeat.plan`` lists."""
    yield evaluate(BSP(), wire, setting)
    yield from _suggest_local(wire, setting)
    yield evaluate(SelSync(target_lssr=setting.lssr), wire, setting)
    yield suggest_streaming(wire, setting)
    yield _suggest_cyclic(wire, setting)
    yield _suggest_eager(wire, setting)


def _suggest_local(wire: Precision | None, setting: Setting) -> Iterator[Measured]:
    """Yield LocalSGD with ``SHORT_PERIOD`` and with the smallest sufficient period, ascending.

    A period H is sufficient if its idle share is at most ``IDLE_LIMIT``. If no tried period is, the
    longest one is yielded. The search assumes that workers wait c + d·√H for each mean: c for the
    transfer, and d·√H for slower workers because of jitter. The last two runs give c and d (the
    first run alone: d = 0). From c and d follows the next H to try.
    """
    known: dict[int, Measured] = {}
    waits: list[tuple[int, float]] = []
    period = SHORT_PERIOD
    while period not in known and len(known) <= _RUNS:
        measured = known[period] = evaluate(LocalSGD(period=period), wire, setting)
        computed = measured.step_seconds
        waits.append((period, (measured.forecast.step_seconds - computed) * period))
        period = _period_for(waits[-2:], computed)
    sufficient = [n for n, measured in known.items() if _sufficient(measured, setting)]
    smallest = min(sufficient, default=max(known))
    for shown in sorted({SHORT_PERIOD, smallest}):
        yield known[shown]


def _period_for(waits: Sequence[tuple[int, float]], computed: float) -> int:
    """Return the least H with (c + d·√H)/(H·t + c + d·√H) ≤ ``IDLE_LIMIT``.

    Args:
        waits: One or two pairs (H, c + d·√H).
        computed: Duration t of a step without waiting, seconds.
    """
    (period, wait), *later = waits
    slope = 0.0
    for later_period, later_wait in later:
        slope = (later_wait - wait) / (math.sqrt(later_period) - math.sqrt(period))
        slope = max(0.0, slope)
    fixed = max(0.0, wait - slope * math.sqrt(period))
    share = computed * IDLE_LIMIT / (1 - IDLE_LIMIT)
    root = (slope + math.sqrt(slope**2 + 4 * share * fixed)) / (2 * share)
    return max(1, math.ceil(root**2 * (1 - _TINY)))


def _sufficient(measured: Measured, setting: Setting) -> bool:
    """Return True if the idle share is at most ``IDLE_LIMIT``, up to its error."""
    return measured.forecast.idle <= IDLE_LIMIT + (_NOISE if setting.jitter else _TINY)


def suggest_streaming(wire: Precision | None, setting: Setting) -> Measured:
    """Return StreamingAveraging with the default staleness, or a larger one if workers wait much.

    A larger staleness bound shortens the waits. At most five values are tried.
    """
    strategy = StreamingAveraging()
    for _ in range(_RUNS):
        measured = evaluate(strategy, wire, setting)
        idle = measured.forecast.idle
        if idle <= IDLE_LIMIT + _TINY:
            break
        factor = max(_GROWTH, (1 - IDLE_LIMIT) / (1 - idle))
        strategy = replace(strategy, staleness=math.ceil(strategy.staleness * factor))
    return measured


def _suggest_cyclic(wire: Precision | None, setting: Setting) -> Measured:
    """Return AsyncAveraging with the shortest cycle found in which workers do not wait.

    A cycle is the steps from one mean to the next: half the staleness. If workers wait, the mean
    takes as long as the cycle. The next cycle to try has the steps that fit into this time. With
    jitter the cycle is then extended, at most four times, until the idle share is at most
    ``IDLE_LIMIT``.
    """
    steady = replace(setting, jitter=0.0)
    cycle = 1
    for _ in range(_RUNS):
        measured = evaluate(AsyncAveraging(staleness=2 * cycle), wire, steady)
        if measured.forecast.idle <= _TINY:
            break
        mean_seconds = cycle * measured.forecast.step_seconds
        cycle = max(cycle + 1, math.ceil(mean_seconds / measured.step_seconds * (1 - _TINY)))
    if not setting.jitter:
        return measured
    for extension in (0, 1, 2, 4, 8):  # the first additional steps help most
        cycle += extension
        measured = evaluate(AsyncAveraging(staleness=2 * cycle), wire, setting)
        if _sufficient(measured, setting):
            break
    return measured


def _suggest_eager(wire: Precision | None, setting: Setting) -> Measured:
    """Return eager AsyncAveraging, with a staleness bound that it does not reach in the run."""
    unbounded = AsyncAveraging(schedule="eager", staleness=_UNBOUNDED)
    measured = evaluate(unbounded, wire, setting)
    reached = measured.details.get("staleness_max", 0) * (_MARGIN if setting.jitter else 1.0)
    staleness = max(_EAGER_BOUND, math.ceil(reached) + 1)
    row = replace(measured.forecast, strategy=f"async:schedule=eager,staleness={staleness}")
    return replace(measured, strategy=replace(unbounded, staleness=staleness), forecast=row)
