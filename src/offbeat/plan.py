"""How long a step takes under each strategy, from a formula, and which strategy to try first.

A prediction of time alone. It knows nothing of the final metric, which a run has to tell. Longer
than 400 lines because the equations, their code and the rule that follows from them are read
together.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import accumulate, repeat
from statistics import NormalDist
from typing import Any

from offbeat.arguments import require_integer, require_number
from offbeat.costs import all_reduce_seconds
from offbeat.strategies import BSP, AsyncAveraging, LocalSGD, SelSync, Strategy, parse_strategy
from offbeat.units import (
    parse_count,
    show_bandwidth,
    show_bytes,
    show_seconds,
    to_bandwidth,
    to_seconds,
)

IDLE_LIMIT = 0.05
"""The share of time that workers may wait without anybody minding."""

ROLL_BYTES = 40
"""The five numbers that precede a mean of models (``strategies.base.Roll``)."""

_SHORT_PERIOD = 8  # where docs/choosing.md says to start with LocalSGD
_FAR_APART = 64  # steps; beyond it a forecast warns
_EAGER_BOUND = 16  # the least staleness suggested for the eager schedule, a safety bound

HEADINGS = ("strategy", "step", "speed-up", "idle", "sent per step", "extra memory", "note")


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What one strategy would do.

    Attributes:
        strategy: Text form, as ``offbeat.parse_strategy`` reads it.
        step_seconds: Mean time from one step to the next, computing and waiting.
        overlapped_step_seconds: The same if all of the communication of BSP were hidden behind
            computing, which no backward quite reaches; equal to ``step_seconds`` for the others.
        throughput: Samples a second, relative to one worker alone; N at best.
        idle: Share of the time spent waiting, in [0, 1].
        apart_steps: The most own steps of a worker that no mean of models contains: 0 with BSP,
            H, τ; with SelSync the average, 1/(1 − LSSR), ``inf`` if it never synchronizes.
        payload_bytes: Bytes a step that a worker hands to collectives, as in ``Stats``.
        memory_bytes: Flat copies on top of model, gradients and optimizer.
        note: What the setting hides or spreads over steps.
    """

    strategy: str
    step_seconds: float
    overlapped_step_seconds: float
    throughput: float
    idle: float
    apart_steps: float
    payload_bytes: float
    memory_bytes: float
    note: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Forecasts for one model, machine and network, and which strategy to try first.

    Attributes:
        parameters: Numbers that are averaged.
        step_seconds: One step computed alone, t.
        workers: N.
        bandwidth: Bits a second, of every worker's link in each direction.
        latency_seconds: α.
        jitter: Standard deviation of a step / t.
        model_bytes: M.
        all_reduce_seconds: How long a mean of the model is under way.
        rows: One forecast a strategy.
        recommendation: One of the rows.
        reason: One sentence why.
    """

    parameters: float
    step_seconds: float
    workers: int
    bandwidth: float
    latency_seconds: float
    jitter: float
    model_bytes: float
    all_reduce_seconds: float
    rows: tuple[Forecast, ...]
    recommendation: Forecast
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """All numbers as plain JSON values; an infinite one is the string "inf"."""

        def row(forecast: Forecast) -> dict[str, Any]:
            return {k: "inf" if v == math.inf else v for k, v in asdict(forecast).items()}

        return {
            **asdict(self),
            "rows": [row(forecast) for forecast in self.rows],
            "recommendation": row(self.recommendation),
        }

    def caption(self) -> str:
        """The question, in one line."""
        jitter = f" ± {100 * self.jitter:g} %" if self.jitter else ""
        return (
            f"{self.parameters:,.0f} parameters ({show_bytes(self.model_bytes)}), "
            f"{show_seconds(self.step_seconds)}{jitter} a step, {self.workers} workers, "
            f"{show_bandwidth(self.bandwidth)}, latency {show_seconds(self.latency_seconds)}; "
            "predicted, not measured"
        )

    def markdown(self) -> str:
        """Caption, table and recommendation as Markdown."""
        lines = [f"| {' | '.join(HEADINGS)} |", f"|{'---|' * len(HEADINGS)}"]
        lines += [f"| {' | '.join((f'`{row[0]}`', *row[1:]))} |" for row in rows(self)]
        advice = f"Try `{self.recommendation.strategy}` first: {self.reason}."
        return f"{self.caption()}\n\n" + "\n".join(lines) + f"\n\n{advice}\n"


def plan(
    *,
    parameters: float | str,
    step_time: float | str,
    workers: int,
    bandwidth: float | str,
    latency: float | str = "100us",
    jitter: float = 0.0,
    bytes_per_parameter: float = 4,
    lssr: float = 0.9,
    strategies: Sequence[str | Strategy] | None = None,
) -> Plan:
    """Predict the time of a step under each strategy.

    **Model**, in the order of the code. A(S) is a ring all-reduce of S bytes, z_N the expected
    maximum of N standard normal numbers, C a period or cycle; steady state, no warm-up:

        M = bytes_per_parameter · parameters;  σ = jitter·t
        A(S) = 2(N−1)·(α + S/(N·B));  m = A(M);  r = A(40)       m a mean, r a roll or flags
        z_N = ∫ z·N·φ(z)·Φ(z)^(N−1) dz
        W(k) = k·t + √k·σ·z_N                                    k steps of the slowest of N
        BSP                step = W(1) + m;  overlapped, at least max(W(1), m)
        LocalSGD(H)        C = W(H) + r + m;  step = C/H
        SelSync            step = W(1) + r + (1−LSSR)·m
        AsyncAveraging(τ)  β = τ/2;  σ_C = √β·σ;  slack d = max(0, β·t − r − m)
                           C = max(β·t + σ_C·z_N/(1 + d/σ_C), r + m);  step = C/β
          eager            roll and merge end at step boundaries, ⌈r/t⌉ + ⌈m/t⌉ steps a merge;
                           waits for what is left of them when own steps reach τ
        idle = 1 − t/step;  throughput = N·t/step

    *What it leaves out*: BSP overlaps with backward, so its step lies between the two values given.
    LocalSGD and SelSync exchange the roll while the optimizer steps; here it is waited for. A
    large model travels in several buckets, each of which pays the latencies. Jitter is normal and
    independent from step to step and worker to worker; a worker that is always slower than the
    others is not modelled, nor is a network shared with others. The term with d is no theorem: a
    Monte-Carlo of 2 to 64 workers gives at most 15 % more, and, with less slack than σ_C, down to
    half of it. The eager schedule absorbs jitter unless it waits at its bound.

    **Strategies**, unless given: ``bsp``; ``local`` with period 8, and with the smallest period
    whose idle share is at most 5 %; ``selsync:target_lssr=…``; ``async`` with the smallest even
    staleness that hides the merge, τ = 2·⌈(r + m)/t⌉ (with jitter, also idle ≤ 5 %); ``async``
    eager, whose staleness is a bound that it does not reach.

    **Recommendation**, from the safest to the most different from BSP:

    1. BSP, if its idle share is at most 5 % even without overlap.
    2. The LocalSGD with the shortest period of at most 8 whose idle share is at most 5 %.
    3. Of all that reach 95 % of the best throughput, the one with the fewest steps apart; of equal
       ones, the first in the order BSP, LocalSGD, SelSync, cyclic, eager.

    SelSync sends as much as LocalSGD(1/(1−LSSR)), but at other steps. What that gains is in the
    metric, not in the time, so the rule rarely picks it.

    Args:
        parameters: How many numbers are averaged, or text like "25M": parameters and
            floating-point buffers.
        step_time: t, a step computed alone: seconds, or text like "50ms".
        workers: N (≥ 1).
        bandwidth: 8·B, of each worker's link in each direction: bits a second, or "1Gbit/s".
        latency: α, of one message: seconds, or text like "100us" (≥ 0).
        jitter: Standard deviation of a step, relative to t, in [0, 1].
        bytes_per_parameter: 4 for float32, and for half types too, which travel as float32.
        lssr: Share of local steps in (0, 1) that SelSync is asked for, and taken to have with a
            ``delta``.
        strategies: Forecast these instead, as text or objects.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: an impossible value, or a strategy that has no forecast; the message shows the
            right form.
    """
    require_integer("workers", workers, least=1)
    for name, value in (("jitter", jitter), ("lssr", lssr)):
        require_number(name, value)
    if not 0 <= jitter <= 1:
        raise ValueError(f"jitter must be in [0, 1], like 0.1 for 10 % of a step, got {jitter}")
    if not 0 < lssr < 1:
        raise ValueError(f"lssr must be between 0 and 1, like 0.9, got {lssr}")
    count = parse_count(parameters) if isinstance(parameters, str) else parameters
    _require_positive("parameters", count, "like 25e6 or 25M")
    _require_positive("bytes_per_parameter", bytes_per_parameter, "like 4")
    seconds, bits = to_seconds(step_time), to_bandwidth(bandwidth)
    alpha = to_seconds(latency, allow_zero=True)
    model_bytes = float(bytes_per_parameter * count)
    costs = _Costs(
        workers=workers,
        step=seconds,
        deviation=jitter * seconds,
        merge=all_reduce_seconds(model_bytes, workers, bits / 8, alpha),
        roll=all_reduce_seconds(ROLL_BYTES, workers, bits / 8, alpha),
        model_bytes=model_bytes,
        lssr=lssr,
    )
    if strategies is None:
        strategies = list(_suggestions(costs))
    elif isinstance(strategies, str) or not strategies:
        raise ValueError(f'strategies must be a list like ["bsp", "local:period=8"]: {strategies}')
    forecasts = tuple(_forecast(strategy, costs) for strategy in strategies)
    chosen, reason = _recommend(forecasts, costs)
    return Plan(
        parameters=count,
        step_seconds=seconds,
        workers=workers,
        bandwidth=bits,
        latency_seconds=alpha,
        jitter=jitter,
        model_bytes=model_bytes,
        all_reduce_seconds=costs.merge,
        rows=forecasts,
        recommendation=chosen,
        reason=reason,
    )


def rows(plan: Plan) -> list[tuple[str, ...]]:
    """One row a strategy, as text, in the order of ``HEADINGS``."""
    return [
        (
            row.strategy,
            show_seconds(row.step_seconds),
            f"{row.throughput:.2f}x",
            _percent(row.idle),
            show_bytes(row.payload_bytes),
            show_bytes(row.memory_bytes),
            row.note,
        )
        for row in plan.rows
    ]


@cache
def expected_maximum(workers: int) -> float:
    """z_N: what the largest of N independent standard normal numbers is on average; 0 for one.

    ∫ z·N·φ(z)·Φ(z)^(N−1) dz by the trapezoidal rule, whose error is far below 1e-9 here.
    """
    if workers == 1:
        return 0.0
    normal, width = NormalDist(), 0.01
    points = (width * i for i in range(-1000, 1001))
    return width * sum(z * workers * normal.pdf(z) * normal.cdf(z) ** (workers - 1) for z in points)


@dataclass(frozen=True, kw_only=True)
class _Costs:
    """The letters of the model: seconds, and M in bytes."""

    workers: int  # N
    step: float  # t
    deviation: float  # σ
    merge: float  # m
    roll: float  # r
    model_bytes: float  # M
    lssr: float

    def slowest(self, steps: int) -> float:
        """W(k): how long the slowest worker takes for k steps."""
        return steps * self.step + math.sqrt(steps) * self.deviation * expected_maximum(
            self.workers
        )

    def pipelined(self, steps: int, hidden: float) -> float:
        """C: a cycle of k steps, during which ``hidden`` seconds of communication go on."""
        spread = math.sqrt(steps) * self.deviation  # σ_C
        late = 0.0
        if spread:
            slack = max(0.0, steps * self.step - hidden)
            late = spread * expected_maximum(self.workers) / (1 + slack / spread)
        return max(steps * self.step + late, hidden)

    def idle(self, step_seconds: float) -> float:
        return max(0.0, 1 - self.step / step_seconds)

    def steps_for(self, seconds: float) -> int:
        """⌈seconds/t⌉, at least 1; a hair above an integer is that integer."""
        return max(1, math.ceil(seconds / self.step * (1 - 1e-9)))

    def in_steps(self, seconds: float) -> str:
        return f"{_number(seconds / self.step)} steps"


def _smallest(least: int, enough: Callable[[int], bool]) -> int:
    """The first integer ≥ ``least`` that is enough, if every larger one is too."""
    high = next(n for n in accumulate(repeat(2), int.__mul__, initial=least) if enough(n))
    low = max(least - 1, high // 2)  # not enough, or below the range
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _suggestions(costs: _Costs) -> Iterator[str]:
    """The strategies to compare, as text."""

    def local_is_enough(period: int) -> bool:
        return costs.idle(_local_seconds(period, costs) / period) <= IDLE_LIMIT

    def cycle_is_enough(steps: int) -> bool:
        merge = costs.merge + costs.roll
        return costs.idle(costs.pipelined(steps, merge) / steps) <= IDLE_LIMIT

    yield "bsp"
    periods = {_smallest(1, local_is_enough), _SHORT_PERIOD}
    yield from (f"local:period={period}" for period in sorted(periods))
    yield f"selsync:target_lssr={costs.lssr:g}"
    cycle = _smallest(costs.steps_for(costs.merge + costs.roll), cycle_is_enough)
    yield f"async:staleness={2 * cycle}"
    # Own steps past P are at most a roll and two merges, rounded up to step boundaries. Workers
    # out of step see each of the three end up to one boundary later.
    most = costs.steps_for(costs.roll) + 2 * costs.steps_for(costs.merge) + 3
    yield f"async:schedule=eager,staleness={max(_EAGER_BOUND, most)}"


def _forecast(chosen: str | Strategy, costs: _Costs) -> Forecast:
    if not isinstance(chosen, str | Strategy):
        raise TypeError(f"a strategy is text like local:period=8, or a Strategy; got {chosen!r}")
    text = str(chosen).strip()
    strategy = parse_strategy(chosen) if isinstance(chosen, str) else chosen
    match strategy:
        case BSP():
            return _bsp(text, costs)
        case LocalSGD():
            return _local(text, strategy, costs)
        case SelSync():
            return _selsync(text, strategy, costs)
        case AsyncAveraging(schedule="cyclic"):
            return _cyclic(text, strategy, costs)
        case AsyncAveraging():
            return _eager(text, strategy, costs)
    raise ValueError(f"there is no forecast for {text}, only for bsp, local, selsync and async")


def _make(
    text: str,
    costs: _Costs,
    *,
    step: float,
    apart: float,
    payload: float,
    copies: int,
    note: str,
    overlapped: float | None = None,
) -> Forecast:
    far = "" if apart <= _FAR_APART else f"; {_number(apart)} steps apart, watch the final metric"
    return Forecast(
        strategy=text,
        step_seconds=step,
        overlapped_step_seconds=step if overlapped is None else overlapped,
        throughput=costs.workers * costs.step / step,
        idle=costs.idle(step),
        apart_steps=apart,
        payload_bytes=payload if costs.workers > 1 else 0.0,
        memory_bytes=copies * costs.model_bytes,
        note=("nobody to wait for" if costs.workers == 1 else note) + far,
    )


def _bsp(text: str, costs: _Costs) -> Forecast:
    slowest = costs.slowest(1)
    overlapped = max(slowest, costs.merge)
    best = f"{show_seconds(overlapped)} a step, {_percent(costs.idle(overlapped))} idle"
    return _make(
        text,
        costs,
        step=slowest + costs.merge,
        overlapped=overlapped,
        apart=0,
        payload=costs.model_bytes,
        copies=1,
        note=f"without overlap; if backward hides all it can: {best}",
    )


def _local_seconds(period: int, costs: _Costs) -> float:
    """C of LocalSGD."""
    return costs.slowest(period) + costs.roll + costs.merge


def _local(text: str, strategy: LocalSGD, costs: _Costs) -> Forecast:
    period = strategy.period
    return _make(
        text,
        costs,
        step=_local_seconds(period, costs) / period,
        apart=period,
        payload=(costs.model_bytes + ROLL_BYTES) / period,
        copies=1,
        note=f"spreads a mean of {costs.in_steps(costs.merge)} over {period}",
    )


def _selsync(text: str, strategy: SelSync, costs: _Costs) -> Forecast:
    lssr = costs.lssr if strategy.target_lssr is None else strategy.target_lssr
    if strategy.target_lssr is None and strategy.delta in (0, math.inf):
        lssr = float(strategy.delta == math.inf)
    share = max(1 - lssr, 1 / (strategy.max_interval or math.inf))
    if strategy.flags == "deferred":  # flags have a step to arrive; a mean calls the roll anew
        step = costs.pipelined(1, costs.roll) + share * (costs.roll + costs.merge)
    else:
        step = costs.slowest(1) + costs.roll + share * costs.merge
    rolls = 1 + (share if strategy.flags == "deferred" else 0)
    spent = f"a mean at {_percent(share)} of the steps"
    return _make(
        text,
        costs,
        step=step,
        apart=1 / share if share else math.inf,
        payload=rolls * ROLL_BYTES + share * costs.model_bytes,
        copies=1,
        note=f"{spent}, flags of {show_seconds(costs.roll)} at each",
    )


def _async_copies(strategy: AsyncAveraging) -> int:
    return 2 if (strategy.outer_lr, strategy.outer_momentum) == (1, 0) else 4


def _cyclic(text: str, strategy: AsyncAveraging, costs: _Costs) -> Forecast:
    cycle = strategy.staleness // 2
    merge = costs.merge + costs.roll
    hides = cycle >= costs.steps_for(merge)
    return _make(
        text,
        costs,
        step=costs.pipelined(cycle, merge) / cycle,
        apart=strategy.staleness,
        payload=(costs.model_bytes + ROLL_BYTES) / cycle,
        copies=_async_copies(strategy),
        note=f"a merge of {costs.in_steps(merge)} "
        + (f"behind a cycle of {cycle}" if hides else f"outlasts its cycle of {cycle}"),
    )


def _eager(text: str, strategy: AsyncAveraging, costs: _Costs) -> Forecast:
    steps, waited = _eager_merge(strategy.staleness, costs)
    # Who never reaches the bound never waits for anybody.
    spread = costs.slowest(1) - costs.step if waited else 0.0
    return _make(
        text,
        costs,
        step=costs.step + waited / steps + spread,
        apart=strategy.staleness,
        payload=(costs.model_bytes + ROLL_BYTES) / steps,
        copies=_async_copies(strategy),
        note=f"a merge every {_number(steps)} steps, "
        + ("waits at the bound" if waited else "never reaches the bound"),
    )


def _eager_merge(staleness: int, costs: _Costs) -> tuple[float, float]:
    """Own steps and waiting seconds a merge, on average, with workers in step.

    Follows merge after merge from landing to landing, until one begins as an earlier one did.
    """
    seen: dict[int, int] = {}  # own steps past P just after landing: which merge
    history: list[tuple[int, float]] = []
    past = 1
    while past not in seen:
        seen[past] = len(history)
        steps = before = max(past, 1) - past  # a roll is called with a new step only
        past += before
        rolling = min(costs.steps_for(costs.roll), staleness - past)
        past += rolling
        merging = min(costs.steps_for(costs.merge), staleness - past)
        steps += rolling + merging
        waited = max(0.0, costs.roll - rolling * costs.step)
        waited += max(0.0, costs.merge - merging * costs.step)
        rounding = 2e-9 * (costs.roll + costs.merge)  # what steps_for lets pass
        history.append((steps, waited if waited > rounding else 0.0))
        past = merging  # the snapshot was taken when the merge began
    period = history[seen[past] :]
    return sum(s for s, _ in period) / len(period), sum(w for _, w in period) / len(period)


_ORDER = (BSP, LocalSGD, SelSync, AsyncAveraging)


def _recommend(forecasts: Sequence[Forecast], costs: _Costs) -> tuple[Forecast, str]:
    """The rule in the docstring of ``plan``, and why."""
    kinds = {f.strategy: parse_strategy(f.strategy) for f in forecasts}
    bsp = _bsp("bsp", costs)
    would = f"BSP would wait {_percent(bsp.idle)} of the time"
    hidden = costs.idle(bsp.overlapped_step_seconds)
    if hidden <= IDLE_LIMIT:
        would += f" ({_percent(hidden)} if backward hid all of it, so measure that first)"

    for forecast in forecasts:
        if isinstance(kinds[forecast.strategy], BSP) and forecast.idle <= IDLE_LIMIT:
            if costs.workers == 1:
                return forecast, "a single worker has nobody to wait for"
            return forecast, f"BSP waits {_percent(bsp.idle)} of the time even without overlap"

    short = [
        f
        for f in forecasts
        if isinstance(kinds[f.strategy], LocalSGD)
        and f.apart_steps <= _SHORT_PERIOD
        and f.idle <= IDLE_LIMIT
    ]
    fastest = max(f.throughput for f in forecasts)
    fast = [f for f in forecasts if f.throughput >= (1 - IDLE_LIMIT) * fastest]

    def distance(forecast: Forecast) -> tuple[float, int, bool]:
        strategy = kinds[forecast.strategy]
        eager = isinstance(strategy, AsyncAveraging) and strategy.schedule == "eager"
        return forecast.apart_steps, _ORDER.index(type(strategy)), eager

    chosen = min(short or fast, key=distance)
    match kinds[chosen.strategy]:
        case BSP():
            return chosen, f"{would}, and no other strategy given is faster"
        case AsyncAveraging():
            why = f"a merge takes {costs.in_steps(costs.merge + costs.roll)}, "
            if chosen.idle < 0.0005:
                why += f"so {chosen.strategy} hides it"
            else:
                why += f"and with {chosen.strategy} workers wait {_percent(chosen.idle)}"
        case _:
            why = f"{chosen.strategy} waits {_percent(chosen.idle)}"
    if chosen.apart_steps > _FAR_APART:
        why += (
            f", but lets the workers go {_number(chosen.apart_steps)} steps apart: watch the final "
            "metric, or make a step longer with a larger batch"
        )
    return chosen, f"{would}; {why}"


def _number(value: float) -> str:
    """Three digits, and all that are before the point."""
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"


def _percent(share: float) -> str:
    value = 100 * share
    return f"{value:.1f} %" if 0.05 <= value < 9.95 else f"{value:.0f} %"


def _require_positive(name: str, value: object, form: str) -> None:
    require_number(name, value)
    if not 0 < value < math.inf:  # type: ignore[operator]
        raise ValueError(f"{name} must be positive and finite, {form}, got {value}")
