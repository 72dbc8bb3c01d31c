"""The default strategies of a plan, and their settings, which a few runs determine."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from offbeat.plan.forecast import Measured, measure
from offbeat.plan.run import Setting
from offbeat.quantization.automatic_wire import CHOICES, MOST_WAITING
from offbeat.quantization.wire import Precision
from offbeat.strategies import (
    BSP,
    AsyncAveraging,
    LocalSGD,
    SelSync,
    Strategy,
    StreamingAveraging,
)
from offbeat.training.compatibility import chooses_precision

IDLE_LIMIT = 0.05
"""Share of the time that workers may wait under a suggested setting."""
SHORT_PERIOD = 8
"""Period of LocalSGD with which docs/choosing.md says to start."""

_EAGER_BOUND = 16  # least staleness suggested for the eager schedule
_MARGIN = 1.25  # factor on the staleness that was reached, if steps vary
_UNBOUNDED = 10**9
_GROWTH = 1.25  # least factor from one staleness to the next
_RUNS = 5  # most runs of a search
_TINY = 1e-6  # share of the time: rounding
_NOISE = 0.003  # share of the time: error of a figure measured with jitter
_FAST = 1e18  # bits per second


def evaluate(
    strategy: Strategy, wire: Precision | None, setting: Setting, text: str | None = None
) -> Measured:
    """Return the forecast of ``strategy`` with ``wire``; None is the strategy's default.

    If the strategy cannot choose a precision itself, "auto" is the most exact precision for which
    workers wait for the link at most a tenth of the time, which is the aim of ``AdaptiveWire``.
    """
    wire = wire or strategy.default_wire
    if wire != "auto" or chooses_precision(strategy):
        return measure(strategy, wire, setting, text=text)
    unhindered = _step_without_link(strategy, setting)
    for precision in CHOICES:
        measured = measure(strategy, precision, setting, text=text)
        if 1 - unhindered / measured.forecast.step_seconds <= MOST_WAITING:
            break
    return measured


def _step_without_link(strategy: Strategy, setting: Setting) -> float:
    """Return the seconds of a step over an infinitely fast link, where only stragglers delay it."""
    if not setting.jitter:
        return setting.step_seconds + setting.tail
    fast = replace(setting, network=replace(setting.network, bandwidth=_FAST, latency=0.0))
    return measure(strategy, "float32", fast).forecast.step_seconds


def suggestions(wire: Precision | None, setting: Setting) -> Iterator[Measured]:
    """Yield the forecasts of the default strategies; see ``offbeat.plan``."""
    yield evaluate(BSP(), wire, setting)
    yield from _suggest_local(wire, setting)
    yield evaluate(SelSync(target_lssr=setting.lssr), wire, setting)
    yield suggest_streaming(wire, setting)
    yield _suggest_cyclic(wire, setting)
    yield _suggest_eager(wire, setting)


def _suggest_local(wire: Precision | None, setting: Setting) -> Iterator[Measured]:
    """Yield LocalSGD with ``SHORT_PERIOD`` and with the smallest sufficient period, ascending.

    The smallest period H is sought whose idle share is at most ``IDLE_LIMIT``. Workers wait
    c + d·√H for each mean, where d is caused by jitter. Without jitter one run gives c; with jitter
    two runs give c and d. They give the next H to try.
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
        computed: t, seconds.
    """
    (period, wait), *more = waits
    slope = 0.0
    for other, another in more:
        slope = max(0.0, (another - wait) / (math.sqrt(other) - math.sqrt(period)))
    fixed = max(0.0, wait - slope * math.sqrt(period))
    share = computed * IDLE_LIMIT / (1 - IDLE_LIMIT)
    root = (slope + math.sqrt(slope**2 + 4 * share * fixed)) / (2 * share)
    return max(1, math.ceil(root**2 * (1 - _TINY)))


def _sufficient(measured: Measured, setting: Setting) -> bool:
    """Return True if workers wait for at most ``IDLE_LIMIT`` of the time."""
    return measured.forecast.idle <= IDLE_LIMIT + (_NOISE if setting.jitter else _TINY)


def suggest_streaming(wire: Precision | None, setting: Setting) -> Measured:
    """Return StreamingAveraging, with a larger staleness if workers wait at the default one.

    If workers wait, the time of a step falls as the staleness grows.
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
    """Return AsyncAveraging with the shortest cycle that hides the merge.

    If a merge takes longer than a cycle, the cycle takes as long as the merge, which gives the next
    cycle to try. With jitter the cycle is then extended until workers wait for at most
    ``IDLE_LIMIT`` of the time.
    """
    steady = replace(setting, jitter=0.0)
    cycle = 1
    for _ in range(_RUNS):
        measured = evaluate(AsyncAveraging(staleness=2 * cycle), wire, steady)
        if measured.forecast.idle <= _TINY:
            break
        merge = cycle * measured.forecast.step_seconds
        cycle = max(cycle + 1, math.ceil(merge / measured.step_seconds * (1 - _TINY)))
    if not setting.jitter:
        return measured
    for more in (0, 1, 2, 4, 8):  # the first steps of slack help most
        cycle += more
        measured = evaluate(AsyncAveraging(staleness=2 * cycle), wire, setting)
        if _sufficient(measured, setting):
            break
    return measured


def _suggest_eager(wire: Precision | None, setting: Setting) -> Measured:
    """Return eager AsyncAveraging with a staleness that it does not reach."""
    unbounded = AsyncAveraging(schedule="eager", staleness=_UNBOUNDED)
    measured = evaluate(unbounded, wire, setting)
    most = measured.details.get("staleness_max", 0) * (_MARGIN if setting.jitter else 1.0)
    staleness = max(_EAGER_BOUND, math.ceil(most) + 1)
    row = replace(measured.forecast, strategy=f"async:schedule=eager,staleness={staleness}")
    return replace(measured, strategy=replace(unbounded, staleness=staleness), forecast=row)
