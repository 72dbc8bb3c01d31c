"""The strategies to compare where none are given, and their settings by a few runs."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from offbeat.plan.forecast import Measured, measure
from offbeat.plan.play import Setting
from offbeat.quantization.automatic_wire import CHOICES, MOST_WAITING
from offbeat.quantization.wire import Precision
from offbeat.simulate import Network
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
"""The share of time that workers may wait without anybody minding."""
SHORT_PERIOD = 8
"""Where docs/choosing.md says to start with LocalSGD."""

_EAGER_BOUND = 16  # the least staleness suggested for the eager schedule, a safety bound
_MARGIN = 1.25  # of the staleness that was seen, where steps vary
_UNBOUNDED = 10**9
_LARGER = 1.25  # from one bound to the next, at least
_RUNS = 5  # of a search, at most
_TINY = 1e-6  # of the time: rounding
_NOISE = 0.003  # likewise, of what is measured with jitter
_FAST = 1e18  # bits a second

Candidate = tuple[Strategy, Measured]


def evaluate(
    strategy: Strategy, wire: Precision | None, setting: Setting, text: str | None = None
) -> Measured:
    """The forecast of ``strategy`` over ``wire``; None is its own.

    "auto" is left to a strategy that chooses. For others it is the most exact precision with which
    the link keeps the workers waiting for at most a tenth of the time, as ``AdaptiveWire`` aims at.
    """
    wire = wire or strategy.default_wire
    if wire != "auto" or chooses_precision(strategy):
        return measure(strategy, wire, setting, text=text)
    free = _step_without_link(strategy, setting)
    for precision in CHOICES:
        found = measure(strategy, precision, setting, text=text)
        if 1 - free / found.forecast.step_seconds <= MOST_WAITING:
            break
    return found


def _step_without_link(strategy: Strategy, setting: Setting) -> float:
    """Seconds of a step over an infinitely fast link: waiting for the slowest alone."""
    if not setting.jitter:
        return setting.step_seconds + setting.tail
    network = setting.network
    fast = Network(
        _FAST,
        0.0,
        workers_per_node=network.workers_per_node,
        inside=network.inside,
        inside_latency=network.inside_latency,
    )
    return measure(strategy, "float32", replace(setting, network=fast)).forecast.step_seconds


def suggestions(wire: Precision | None, setting: Setting) -> Iterator[Candidate]:
    """The strategies to compare, with their forecasts; see ``offbeat.plan``."""
    yield _candidate(BSP(), wire, setting)
    short = _candidate(LocalSGD(period=SHORT_PERIOD), wire, setting)
    period, spread = _smallest_period(short, wire, setting)
    if period < SHORT_PERIOD:
        yield spread
    yield short
    if period > SHORT_PERIOD:
        yield spread
    yield _candidate(SelSync(target_lssr=setting.lssr), wire, setting)
    yield large_enough(wire, setting)
    yield _smallest_cycle(wire, setting)
    yield _unbounded(wire, setting)


def _candidate(strategy: Strategy, wire: Precision | None, setting: Setting) -> Candidate:
    return strategy, evaluate(strategy, wire, setting)


def _smallest_period(
    short: Candidate, wire: Precision | None, setting: Setting
) -> tuple[int, Candidate]:
    """LocalSGD with the smallest period H whose idle share is at most ``IDLE_LIMIT``.

    All wait c + d·√H for each mean, where d is due to jitter. One run gives c, if there is none,
    two give both, and so the next H.
    """
    known = {SHORT_PERIOD: short}
    waits: list[tuple[int, float]] = []
    period = SHORT_PERIOD
    for _ in range(_RUNS):
        measured = known[period][1]
        computed = measured.step_seconds
        waits.append((period, (measured.forecast.step_seconds - computed) * period))
        period = _period_for(waits[-2:], computed)
        if period in known:
            break
        known[period] = _candidate(LocalSGD(period=period), wire, setting)
    least = _enough(known, setting) or max(known)
    return least, known[least]


def _period_for(waits: Sequence[tuple[int, float]], computed: float) -> int:
    """The least H with (c + d·√H)/(H·t + c + d·√H) at most ``IDLE_LIMIT``."""
    (period, wait), *more = waits
    slope = 0.0
    for other, another in more:
        slope = max(0.0, (another - wait) / (math.sqrt(other) - math.sqrt(period)))
    fixed = max(0.0, wait - slope * math.sqrt(period))
    share = computed * IDLE_LIMIT / (1 - IDLE_LIMIT)
    root = (slope + math.sqrt(slope**2 + 4 * share * fixed)) / (2 * share)
    return max(1, math.ceil(root**2 * (1 - _TINY)))


def _enough(known: Mapping[int, Candidate], setting: Setting) -> int | None:
    """The least of the settings with which workers wait for at most ``IDLE_LIMIT``."""
    limit = IDLE_LIMIT + (_NOISE if setting.jitter else _TINY)
    return min((n for n, one in known.items() if one[1].forecast.idle <= limit), default=None)


def large_enough(wire: Precision | None, setting: Setting) -> Candidate:
    """StreamingAveraging, with a larger bound if workers would wait at the default one.

    There a step takes a time that falls with the bound.
    """
    strategy = StreamingAveraging()
    for _ in range(_RUNS):
        found = _candidate(strategy, wire, setting)
        idle = found[1].forecast.idle
        if idle <= IDLE_LIMIT + _TINY:
            break
        factor = max(_LARGER, (1 - IDLE_LIMIT) / (1 - idle))
        strategy = replace(strategy, staleness=math.ceil(strategy.staleness * factor))
    return found


def _smallest_cycle(wire: Precision | None, setting: Setting) -> Candidate:
    """AsyncAveraging with the shortest cycle that hides the merge; with jitter ``IDLE_LIMIT``.

    With cycles of one step a step takes as long as a merge, if that is longer.
    """
    calm = replace(setting, jitter=0.0)
    cycle = 1
    for _ in range(_RUNS):
        found = _candidate(AsyncAveraging(staleness=2 * cycle), wire, calm)
        measured = found[1]
        if measured.forecast.idle <= _TINY:
            break
        merge = cycle * measured.forecast.step_seconds
        cycle = max(cycle + 1, math.ceil(merge / measured.step_seconds * (1 - _TINY)))
    if not setting.jitter:
        return found
    for more in (0, 1, 2, 4, 8):  # a little slack is worth most
        cycle += more
        found = _candidate(AsyncAveraging(staleness=2 * cycle), wire, setting)
        if _enough({cycle: found}, setting):
            break
    return found


def _unbounded(wire: Precision | None, setting: Setting) -> Candidate:
    """AsyncAveraging with the eager schedule, and a bound that it does not reach."""
    free = AsyncAveraging(schedule="eager", staleness=_UNBOUNDED)
    measured = evaluate(free, wire, setting)
    most = measured.details.get("staleness_max", 0) * (_MARGIN if setting.jitter else 1.0)
    staleness = max(_EAGER_BOUND, math.ceil(most) + 1)
    strategy = replace(free, staleness=staleness)
    row = replace(measured.forecast, strategy=f"async:schedule=eager,staleness={staleness}")
    return strategy, replace(measured, forecast=row)
