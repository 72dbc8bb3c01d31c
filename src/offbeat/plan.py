"""Which strategy to try first: the strategies' own forecasts side by side, and a rule.

A prediction of time alone. It knows nothing of the final metric, which a run has to tell.
The file is long because the rule and its reasons in words are one, and the docstring of ``plan``
says them a third time.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, repeat
from typing import Any

from offbeat.arguments import require_integer, require_number
from offbeat.fabric.choice import MOST_WAITING, PRECISIONS
from offbeat.fabric.wire import Precision, require_precision
from offbeat.simulate import Network
from offbeat.strategies import (
    BSP,
    STRATEGIES,
    AsyncAveraging,
    LocalSGD,
    Strategy,
    StreamingAveraging,
    parse_strategy,
)
from offbeat.strategies.forecast import FAR_APART, Costs, Forecast, number, percent
from offbeat.strategies.node_costs import NodeCosts
from offbeat.strategies.nodes import between_nodes
from offbeat.table import Table
from offbeat.training.requirements import require_nodes, require_wire
from offbeat.units import (
    parse_count,
    show_bandwidth,
    show_bytes,
    show_seconds,
    to_seconds,
)

IDLE_LIMIT = 0.05
"""The share of time that workers may wait without anybody minding."""

NEXT_TO_NOTHING = 0.02
"""The share of waiting at which exact synchronous training costs almost nothing."""
LOST_STEPS = 0.1
"""The share of steps that averaging models loses against BSP, for the same metric. Measured on one
model and one seed (``benchmarks/results/streaming-links.jsonl``): streaming averaging reached four
accuracies with 0.8 to 1.2 times the steps of the ideal, 1.0 times on average over three links."""

_SHORT_PERIOD = 8  # where docs/choosing.md says to start with LocalSGD
_EAGER_BOUND = 16  # the least staleness suggested for the eager schedule, a safety bound

_WATCH = "watch the final metric, or make a step longer with a larger batch"

HEADINGS = ("strategy", "step", "speed-up", "idle", "sent per step", "extra memory", "note")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Forecasts for one model, machine and network, and which strategy to try first.

    Attributes:
        parameters: Numbers that are averaged.
        step_seconds: One step computed alone, t.
        workers: N.
        bandwidth: Bits a second, of every worker's or node's link in each direction.
        latency_seconds: α.
        workers_per_node: L.
        inside: Bits a second, of every worker's link inside its node; None without nodes.
        inside_latency_seconds: α there; likewise.
        node_step_seconds: One step of a node that meets no others, with the mean of its gradients;
            t without nodes.
        jitter: Standard deviation of a step / t.
        wire: Of ``attach``.
        model_bytes: M, before compression.
        mean_seconds: How long a mean of the model is under way.
        rows: One forecast a strategy.
        recommendation: One of the rows.
        reason: One sentence why.
    """

    parameters: float
    step_seconds: float
    workers: int
    bandwidth: float
    latency_seconds: float
    workers_per_node: int
    inside: float | None
    inside_latency_seconds: float | None
    node_step_seconds: float
    jitter: float
    wire: Precision
    model_bytes: float
    mean_seconds: float
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
        wire = f" sent as {self.wire}" if self.wire != "float32" else ""
        nodes = ""
        if self.inside is not None and self.inside_latency_seconds is not None:
            nodes = (
                f" between nodes of {self.workers_per_node} with {show_bandwidth(self.inside)}, "
                f"latency {show_seconds(self.inside_latency_seconds)}, which step every "
                f"{show_seconds(self.node_step_seconds)} alone"
            )
        return (
            f"{self.parameters:,.0f} parameters ({show_bytes(self.model_bytes)}){wire}, "
            f"{show_seconds(self.step_seconds)}{jitter} a step, {self.workers} workers, "
            f"{show_bandwidth(self.bandwidth)}, latency {show_seconds(self.latency_seconds)}"
            f"{nodes}; predicted, not measured"
        )

    def table(self) -> Table:
        """One row a strategy."""
        rows = tuple(
            (
                row.strategy,
                show_seconds(row.step_seconds),
                f"{row.throughput:.2f}x",
                percent(row.idle),
                show_bytes(row.payload_bytes),
                show_bytes(row.memory_bytes),
                row.note,
            )
            for row in self.rows
        )
        return Table(HEADINGS, rows, self.caption())

    def markdown(self) -> str:
        """Caption, table and recommendation as Markdown."""
        advice = f"Try `{self.recommendation.strategy}` first: {self.reason}."
        return f"{self.table().markdown()}\n{advice}\n"


def plan(
    *,
    parameters: float | str,
    step_time: float | str,
    workers: int,
    bandwidth: float | str,
    latency: float | str = "100us",
    jitter: float = 0.0,
    wire: Precision | None = None,
    bytes_per_parameter: float = 4,
    lssr: float = 0.9,
    strategies: Sequence[str | Strategy] | None = None,
    workers_per_node: int = 1,
    inside: float | str | None = None,
    inside_latency: float | str | None = None,
) -> Plan:
    """Predict the time of a step under each strategy.

    The equations stand beside those of the algorithms: ``forecast`` of each strategy, in the
    letters of ``offbeat.strategies.forecast.Costs``. Steady state, no warm-up. The simulator finds
    the same, within 2 % in most cases (``tests/strategies/test_forecast.py`` has all of them).

    *What it leaves out*: the arithmetic of sums, codecs and servers. LocalSGD and SelSync exchange
    the roll while the optimizer steps; here it is waited for. Tensors are taken to be small against
    a bucket of 8 MiB. Jitter is normal and independent from step to step and worker to worker; a
    worker that is always slower than the others is not modelled, nor is a network shared with
    others. The eager schedule absorbs jitter unless it waits at its bound.

    **Strategies**, unless given: ``bsp``; ``local`` with period 8, and with the smallest period
    whose idle share is at most 5 %; ``selsync:target_lssr=…``; ``streaming`` in the precision that
    it would choose, with a larger staleness if it would wait at the default one; ``async`` with the
    smallest even staleness that hides the merge, β = τ/2 ≥ (r + m)/t (with jitter, also
    idle ≤ 5 %); ``async`` eager, whose staleness is a bound that it does not reach.

    **Recommendation**:

    1. BSP, if its idle share is at most 10 %: what averages models has needed about so many more
       steps where it was measured (``LOST_STEPS``). At most 2 % is next to nothing.
    2. StreamingAveraging, if it is given and reaches 95 % of the best throughput.
    3. The LocalSGD with the shortest period of at most 8 whose idle share is at most 5 %.
    4. Of all that reach 95 % of the best throughput, the one with the fewest steps apart; of equal
       ones, the first in the order of ``offbeat strategies``, those of one's own last; of equal
       ones of AsyncAveraging the cyclic.

    **Nodes** of L workers, as ``attach(..., node_group=…)`` trains them: a node takes a step when
    the slowest of its workers has computed and the mean of their gradients is there, in buckets
    that leave during backward. Between nodes the strategy is forecast for N/L workers that take so
    long, and each worker sends 1/L of what it sends. "Idle" is waiting for other nodes, as in
    ``Stats``; the speed-up knows both.

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
        wire: How models and gradients travel, as in ``attach``; None is that of each strategy.
        bytes_per_parameter: 4 for float32, and for half types too, which travel as float32.
        lssr: Share of local steps in (0, 1) that SelSync is asked for, and taken to have with a
            ``delta``.
        strategies: Forecast these instead, as text or objects; your own, too, if they define
            ``forecast``.
        workers_per_node: L (≥ 1), a divisor of ``workers``. Then ``bandwidth`` and ``latency`` are
            those of a node's link, which its workers share.
        inside: Of each worker's link inside its node, in each direction; None is "100Gbit/s".
        inside_latency: α there; None is "10us".

    Raises:
        AttachError: a strategy that cannot train in nodes.
        TypeError: an argument of the wrong type.
        ValueError: an impossible value, a strategy that has no forecast, or one that cannot use
            the ``wire``; the message shows the right form.
    """
    require_integer("workers", workers, least=1)
    if wire is not None:
        require_precision(wire)
    require_number("jitter", jitter)
    require_number("lssr", lssr)
    if not 0 <= jitter <= 1:
        raise ValueError(f"jitter must be in [0, 1], like 0.1 for 10 % of a step, got {jitter}")
    if not 0 < lssr < 1:
        raise ValueError(f"lssr must be between 0 and 1, like 0.9, got {lssr}")
    count = parse_count(parameters) if isinstance(parameters, str) else parameters
    _require_positive("parameters", count, "like 25e6 or 25M")
    _require_positive("bytes_per_parameter", bytes_per_parameter, "like 4")
    network = Network(
        bandwidth,
        latency,
        workers_per_node=workers_per_node,
        inside=inside,
        inside_latency=inside_latency,
    )
    if workers % workers_per_node:
        raise ValueError(
            f"workers={workers} do not fill nodes of workers_per_node={workers_per_node}"
        )
    alone = Costs(
        workers=workers,
        step_seconds=to_seconds(step_time),
        bytes_per_second=network.bandwidth / 8,
        latency_seconds=network.latency,
        model_bytes=float(bytes_per_parameter * count),
        jitter=jitter,
        bytes_per_parameter=bytes_per_parameter,
        wire="float32" if wire in (None, "auto") else wire,
        lssr=lssr,
    )
    costs = alone
    if network.inside is not None and network.inside_latency is not None:
        node = NodeCosts(
            workers=workers_per_node,
            bytes_per_second=network.inside / 8,
            latency_seconds=network.inside_latency,
            step_seconds=alone.step_seconds,
        )
        costs = between_nodes(alone, node)
    if strategies is None:
        strategies = list(_suggestions(costs, wire))
    elif isinstance(strategies, str) or not strategies:
        raise ValueError(f'strategies must be a list like ["bsp", "local:period=8"]: {strategies}')
    candidates = [_candidate(strategy, costs, wire) for strategy in strategies]
    chosen, reason = _recommend(candidates, costs)
    return Plan(
        parameters=count,
        step_seconds=alone.step_seconds,
        workers=workers,
        bandwidth=network.bandwidth,
        latency_seconds=network.latency,
        workers_per_node=workers_per_node,
        inside=network.inside,
        inside_latency_seconds=network.inside_latency,
        node_step_seconds=costs.step_seconds,
        jitter=jitter,
        wire=wire or "float32",
        model_bytes=costs.model_bytes,
        mean_seconds=costs.mean_seconds(costs.model_bytes),
        rows=tuple(forecast for _, forecast in candidates),
        recommendation=chosen,
        reason=reason,
    )


_Candidate = tuple[Strategy, Forecast]


def _candidate(chosen: str | Strategy, costs: Costs, wire: Precision | None) -> _Candidate:
    """A strategy and its forecast, under the text that the user has given."""
    if not isinstance(chosen, str | Strategy):
        raise TypeError(f"a strategy is text like local:period=8, or a Strategy; got {chosen!r}")
    strategy = parse_strategy(chosen) if isinstance(chosen, str) else chosen
    require_wire(wire or strategy.default_wire, strategy)
    if costs.node is not None:
        require_nodes(strategy, wire or strategy.default_wire, None, continues=False)
    return strategy, replace(_forecast(strategy, costs, wire), strategy=str(chosen).strip())


def _forecast(strategy: Strategy, costs: Costs, wire: Precision | None) -> Forecast:
    """Over the ``wire``, or the strategy's own."""
    wire = wire or strategy.default_wire
    if wire != "auto" or strategy.chooses:
        return strategy.forecast(replace(costs, wire=wire))
    free = strategy.forecast(replace(costs, bytes_per_second=1e30, latency_seconds=0.0))
    for precision in PRECISIONS:  # as ``Choice`` does
        found = strategy.forecast(replace(costs, wire=precision))
        if 1 - free.step_seconds / found.step_seconds <= MOST_WAITING:
            break
    return found


def _smallest(least: int, enough: Callable[[int], bool]) -> int:
    """The first integer ≥ ``least`` that is enough, if every larger one is too."""
    high = next(n for n in accumulate(repeat(2), int.__mul__, initial=least) if enough(n))
    low = max(least - 1, high // 2)  # not enough, or below the range
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _suggestions(costs: Costs, wire: Precision | None) -> Iterator[str]:
    """The strategies to compare, as text."""

    def local_is_enough(period: int) -> bool:
        return LocalSGD(period=period).forecast(costs).idle <= IDLE_LIMIT

    def cycle_is_enough(steps: int) -> bool:
        return AsyncAveraging(staleness=2 * steps).forecast(costs).idle <= IDLE_LIMIT

    def stream_is_enough(staleness: int) -> bool:
        streaming = StreamingAveraging(staleness=staleness)
        return _forecast(streaming, costs, wire).idle <= IDLE_LIMIT

    yield "bsp"
    periods = {_smallest(1, local_is_enough), _SHORT_PERIOD}
    yield from (f"local:period={period}" for period in sorted(periods))
    yield f"selsync:target_lssr={costs.lssr:g}"
    usual = StreamingAveraging()
    yield str(replace(usual, staleness=_smallest(usual.staleness, stream_is_enough)))
    merge = costs.merge_seconds(costs.model_bytes, math.inf)
    cycle = costs.steps_for(costs.merge_seconds(costs.model_bytes, math.inf, costs.roll_seconds))
    yield f"async:staleness={2 * _smallest(cycle, cycle_is_enough)}"
    # Own steps past P are at most a roll and two merges, rounded up to step boundaries. Workers
    # out of step see each of the three end up to one boundary later.
    most = costs.steps_for(costs.roll_seconds) + 2 * costs.steps_for(merge) + 3
    yield f"async:schedule=eager,staleness={max(_EAGER_BOUND, most)}"


def _recommend(candidates: Sequence[_Candidate], costs: Costs) -> tuple[Forecast, str]:
    """The rule in the docstring of ``plan``, and why."""
    given = [forecast for strategy, forecast in candidates if isinstance(strategy, BSP)]
    bsp = given[0] if given else BSP().forecast(costs)
    if given and bsp.idle <= LOST_STEPS:
        return bsp, _why_bsp(bsp, costs)
    would = f"BSP would wait {percent(bsp.idle)} of the time"
    fastest = max(forecast.throughput for _, forecast in candidates)
    fast = [one for one in candidates if one[1].throughput >= (1 - IDLE_LIMIT) * fastest]
    for strategy, forecast in fast:
        if isinstance(strategy, StreamingAveraging):
            return forecast, f"{would}; {_why_streaming(forecast, costs)}"

    short = [
        (strategy, forecast)
        for strategy, forecast in candidates
        if isinstance(strategy, LocalSGD)
        and forecast.apart_steps <= _SHORT_PERIOD
        and forecast.idle <= IDLE_LIMIT
    ]
    order = [*STRATEGIES.values()]

    def distance(candidate: _Candidate) -> tuple[float, int, bool]:
        strategy, forecast = candidate
        kind = type(strategy)
        eager = isinstance(strategy, AsyncAveraging) and strategy.schedule == "eager"
        return forecast.apart_steps, order.index(kind) if kind in order else len(order), eager

    strategy, chosen = min(short or fast, key=distance)
    if isinstance(strategy, BSP):
        return chosen, f"{would}, and no other strategy given is faster"
    why = f"{chosen.strategy} waits {percent(chosen.idle)}"
    if isinstance(strategy, AsyncAveraging):
        merge = costs.merge_seconds(costs.model_bytes, math.inf, costs.roll_seconds)
        why = f"and with {chosen.strategy} workers wait {percent(chosen.idle)}"
        if chosen.idle < 0.0005:
            why = f"so {chosen.strategy} hides it"
        why = f"a merge takes {costs.in_steps(merge)}, {why}"
    if chosen.apart_steps > FAR_APART:
        why += f", but lets the workers go {number(chosen.apart_steps)} steps apart: {_WATCH}"
    return chosen, f"{would}; {why}"


def _why_bsp(bsp: Forecast, costs: Costs) -> str:
    if costs.workers == 1:
        return f"a single {'worker' if costs.node is None else 'node'} has nobody to wait for"
    waits = f"BSP waits {percent(bsp.idle)} of the time"
    if bsp.idle <= NEXT_TO_NOTHING:
        return f"exact synchronous training costs almost nothing here, {waits}"
    return f"{waits}, no more than averaging models may lose in steps"


def _why_streaming(chosen: Forecast, costs: Costs) -> str:
    """How often the whole model passes, in what, and what is waited for."""
    once = replace(costs, wire=chosen.wire).mean_bytes(costs.model_bytes)
    passes = once / (chosen.payload_bytes * (1 if costs.node is None else costs.node.workers))
    why = f"{chosen.strategy} sends the model in {chosen.wire} beside computing, "
    why += "all of it in each step" if passes < 1.05 else f"all of it every {number(passes)} steps"
    why += f", and waits {percent(chosen.idle)}"
    return why if passes <= FAR_APART else f"{why}: {_WATCH}"


def _require_positive(name: str, value: object, form: str) -> None:
    require_number(name, value)
    if not 0 < value < math.inf:  # type: ignore[operator]
        raise ValueError(f"{name} must be positive and finite, {form}, got {value}")
