"""The planner: predicts the time of a training step under each strategy, and recommends one.

The forecasts are formulas. The tests compare them with the simulator (``offbeat.simulate``), which
runs the code of the strategies. A plan predicts time and traffic. It does not predict the final
metric, which only training shows.

Symbols: N workers, or nodes of L workers; M bytes of the model in float32; t seconds of a step
without communication; α seconds of latency; B bytes per second of a link. The collectives take as
long as in the simulator:

* all-reduce of m bytes: 2(N−1)·(α + m/(N·B))
* all-gather of m bytes: α + (N−1)·m/B
* all-to-all of m bytes: α + (N−1)·m/(N·B)

This module imports neither torch nor the simulator, so that ``offbeat plan`` answers at once.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from statistics import NormalDist, fmean
from typing import Any, cast

import numpy as np

from offbeat.arguments import (
    Precision,
    Range,
    did_you_mean,
    require_choice,
    require_integer,
    require_number,
)
from offbeat.display.table import Table
from offbeat.strategies import (
    BSP,
    AsyncAveraging,
    DiLoCo,
    LocalSGD,
    SelSync,
    Strategy,
    StreamingAveraging,
)
from offbeat.strategies.base import SharedModel
from offbeat.strategies.registry import parse_strategy
from offbeat.units import (
    show_bandwidth,
    show_bytes,
    show_seconds,
    to_bandwidth,
    to_count,
    to_seconds,
)

# -- the rule --------------------------------------------------------------------------------------
# README.md and docs/choosing.md show the same rule as a table, and docs/evidence.md its reasons.

LEAST_WAITING, MOST_WAITING = 0.05, 0.9
"""Shares of the time that DDP waits, between which the default strategy is recommended."""
MEASURED_SEND_STEPS = 9.0
"""Largest S at which the default strategy was measured to reach 90 % of the ideal's improvement in
at most 1.15 times the ideal's time, with a CNN and with a transformer."""
MEASURED_PARAMETERS, MEASURED_WORKERS = 550_000, 16
"""Largest model and largest number of workers that were measured with several seeds."""

DEFAULT_ROWS = (
    *("bsp", "bsp --wire int4", "local:period=2 --wire int4", "local:period=8"),
    *("selsync:target_lssr=0.9", "async", "streaming"),
)
LONG_LATENCY_ROW = "streaming --wire int4"


def _recommend(bsp: "Forecast", alone: bool, long_latency: bool) -> tuple[str | None, str]:
    """Return the text form of the strategy to try first, or None to compare; and the reason."""
    waits = f"DDP would wait {percent(bsp.idle)} of the time"
    if alone:
        return BSP.name, "a single worker or node waits for no other"
    if bsp.idle < LEAST_WAITING:
        return BSP.name, f"{waits}, so stay with DDP"
    if long_latency:
        return LONG_LATENCY_ROW, f"{waits}, and a message takes longer than a step"
    if bsp.idle <= MOST_WAITING:
        return StreamingAveraging.name, waits
    return None, f"{waits}, and no strategy was measured to be nearly as good as DDP on such a link"


# -- the result ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Predicted figures of one strategy.

    Attributes:
        strategy: Text form, such as "local:period=8". A precision that is not the strategy's
            default follows, as in "local:period=2 --wire int4".
        wire: Precision of what is sent.
        step_seconds: Mean duration of a step, with waiting.
        throughput: Samples per second relative to a single worker. N workers reach N at best.
        idle: Share of the time that a worker waits for others, in [0, 1]. With nodes, only the
            waiting for other nodes.
        interval_steps: Mean number of steps between two means of the same parameter; ``inf`` for a
            single worker or node.
        payload_bytes: Bytes per step that a worker passes to operations, as in ``Stats``; 0 for a
            single worker or node.
    """

    strategy: str
    wire: Precision
    step_seconds: float
    throughput: float
    idle: float
    interval_steps: float
    payload_bytes: float


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Forecasts for one model, machine and network, and the strategy to try first.

    Attributes:
        caption: Model, machine and network in one line.
        model_bytes: Size of the model in float32, bytes.
        send_steps: S, the number of steps t in which a link sends the model once in float32.
        rows: Forecasts, one per strategy.
        recommendation: Text form of the strategy to try first; None if only a comparison on the
            model itself can tell.
        reason: Text that explains the recommendation.
        warning: Text that says in what the setting is beyond the measured ones; empty if in
            nothing.
    """

    caption: str
    model_bytes: float
    send_steps: float
    rows: tuple[Forecast, ...]
    recommendation: str | None
    reason: str
    warning: str

    def to_dict(self) -> dict[str, Any]:
        """Return all figures as JSON values. Infinity in a forecast becomes the string "inf"."""
        rows = [
            {key: "inf" if value == math.inf else value for key, value in asdict(row).items()}
            for row in self.rows
        ]
        return {**asdict(self), "rows": rows}

    def table(self) -> Table:
        """Return a table with one row per strategy."""
        rows = tuple(
            (
                row.strategy,
                show_seconds(row.step_seconds),
                self._speed_up(row),
                percent(row.idle),
                show_bytes(row.payload_bytes),
                "-" if row.interval_steps == math.inf else _steps(row.interval_steps),
            )
            for row in self.rows
        )
        headings = ("strategy", "step", "speed-up", "idle", "sent per step", "mean every")
        return Table(headings, rows, self.caption)

    def _speed_up(self, row: Forecast) -> str:
        """Return the speed-up as text. Beyond the measured settings it is at most an upper bound.

        Averaging models may need more steps than averaging gradients. How many is only known in
        the measured settings.
        """
        name = row.strategy.partition(" ")[0].partition(":")[0]
        shown = f"{row.throughput:.2f}x"
        if name == BSP.name or not self.warning:
            return shown
        overlaps = name in (StreamingAveraging.name, AsyncAveraging.name)
        return "unknown" if overlaps and self.send_steps > MEASURED_SEND_STEPS else f"≤ {shown}"

    def advice(self) -> list[str]:
        """Return S, the recommendation with its reason, and a warning if needed, as lines."""
        act = f"Try {self.recommendation}" if self.recommendation else "Compare on your model"
        lines = [
            f"S = {_number(self.send_steps)}: a link needs {_steps(self.send_steps)} to send the "
            "model once in float32.",
            f"{act} first: {self.reason}.",
        ]
        if self.recommendation != BSP.name:
            lines.append(
                "If the last percent of the metric counts: local:period=2 --wire int4 with Adam, "
                "bsp --wire int4 with SGD."
            )
            lines += [f"Warning: {self.warning}."] if self.warning else []
        return lines


def _beyond(parameters: float, workers: int, send_steps: float) -> str:
    """Return text that says in what a setting is beyond the measured ones; empty if in nothing."""
    measured = {
        f"S up to {MEASURED_SEND_STEPS:g}": send_steps <= MEASURED_SEND_STEPS,
        "models of up to 0.5 million parameters": parameters <= MEASURED_PARAMETERS,
        f"up to {MEASURED_WORKERS} workers": workers <= MEASURED_WORKERS,
    }
    found = ", ".join(text for text, within in measured.items() if not within)
    return f"this is beyond what was measured ({found}), so compare on your model" if found else ""


def _number(value: float) -> str:
    """Return ``value`` with two significant digits, from 100 on as an integer."""
    return f"{value:.2g}" if value < 99.5 else f"{value:,.0f}"


def _steps(value: float) -> str:
    shown = _number(value)
    return "1 step" if shown == "1" else f"{shown} steps"


def percent(share: float) -> str:
    """Return a share as text in percent: "4.9 %" for 0.049, "23 %" for 0.23."""
    value = 100 * share
    return f"{value:.1f} %" if 0.05 <= value < 9.95 else f"{value:.0f} %"


# -- costs of communication ------------------------------------------------------------------------

# Values of the training code, which imports torch. The tests compare them with their sources.
BUCKET_BYTES = 8 * 2**20  # ``averaging/flat.py``
FIRST_BUCKET_BYTES = 2**20  # ``averaging/gradients.py``
BLOCK = 512  # numbers that are quantized together
BLOCK_BYTES = {"bfloat16": 1024, "int8": 516, "int4": 260, "int2": 108}  # of one encoded block
_SINGLE_STAGE_WORKERS = 2  # ``quantization/message.py``
_FORWARD_SHARE = 1 / 3  # ``training/backward_hooks.py``
_VOTE_BYTES = 8 * 8  # without the numbers of a strategy
_SIZER_SLACK = 0.1  # ``averaging/pace.py``
_AGREEMENT_BYTES = 8 * 64  # with the gradients: votes, and a number per tensor


@dataclass(frozen=True)
class _Links:
    """Links of ``size`` members, of ``rate`` bytes per second and ``latency`` seconds a message.

    In an all-gather ``shared`` members use a link together. A ring uses each link once.
    """

    size: int
    rate: float
    latency: float
    shared: int = 1

    def all_reduce(self, size: float) -> float:
        """Return the seconds of an all-reduce of ``size`` bytes."""
        return 2 * (self.size - 1) * (self.latency + size / (self.size * self.rate))

    def gather(self, size: float) -> float:
        """Return the seconds of an all-gather of ``size`` bytes from each member."""
        return self.latency + (self.size - 1) * size * self.shared / self.rate

    def sum(self, size: float, wire: str, *, parts: int = 0, vote: int = 0) -> tuple[float, float]:
        """Return the seconds on the link, and the bytes passed to operations, of a sum.

        A quantized sum is an all-to-all and an all-gather, or between two members a single
        all-gather. Where quantization, which pads to blocks, would save no bytes, it is exact.

        Args:
            size: Bytes in float32, of one part.
            wire: Precision.
            parts: Number of parts of a model in the message. 0: gradients are summed.
            vote: Bytes of a vote, which is part of each row of a quantized message.
        """
        block, count = BLOCK_BYTES.get(wire, math.inf), max(1, parts)
        chunk = math.ceil(size / 4 / (BLOCK * self.size)) * block  # of each member
        if wire == "float32" or self.size * chunk >= size:
            votes = self.gather(vote) if vote else 0.0
            return count * self.all_reduce(size) + votes, count * size + vote
        if parts and self.size <= _SINGLE_STAGE_WORKERS:
            sent = parts * math.ceil(size / 4 / BLOCK) * block + vote
            return self.gather(sent), sent
        # In an all-to-all of N chunks, as many bytes arrive as in an all-gather of a chunk.
        chunk *= count
        sent = self.size * (chunk + vote) + chunk
        return self.gather(chunk + vote) + self.gather(chunk), sent

    def overlapped(self, seconds: float, size: float, wire: str) -> float:
        """Return the seconds of a step that averages ``size`` bytes of gradients in backward.

        ``seconds`` is its compute time.
        """
        first = min(FIRST_BUCKET_BYTES, BUCKET_BYTES)
        full = math.ceil((size - first) / BUCKET_BYTES) - 1  # buckets between the first and last
        agreement = self.gather(_AGREEMENT_BYTES)
        if full < 0:  # a single bucket
            return seconds + agreement + self.sum(size, wire)[0]
        each, _ = self.sum(BUCKET_BYTES, wire)
        last, _ = self.sum(size - first - full * BUCKET_BYTES, wire)

        def ready(done: float) -> float:
            return seconds * (_FORWARD_SHARE + (1 - _FORWARD_SHARE) * done / size)

        # The link works off a queue. Its end follows from the bucket after which it is never idle.
        end = ready(first) + self.sum(first, wire)[0] + full * each
        if full:
            end = max(end, ready(first + BUCKET_BYTES) + full * each)
            end = max(end, ready(first + full * BUCKET_BYTES) + each)
        return max(end, seconds) + agreement + last


# -- time of a step --------------------------------------------------------------------------------

_QUANTILES = 100  # at which the distribution of the slowest worker is evaluated
_CYCLES = 400  # simulated cycles of a schedule with jitter
_MESSAGES = 200  # simulated self-clocked messages
_MOST_DRAWS = 1_000_000
_TINY = 1e-9


def _slowest(count: int, deviation: float) -> list[float]:
    """Return equally likely values of the maximum of ``count`` log-normal numbers of mean 1."""
    if not deviation:
        return [1.0]
    variance = math.log1p(deviation**2)
    normal = NormalDist(-variance / 2, math.sqrt(variance))
    ranks = ((i + 0.5) / _QUANTILES for i in range(_QUANTILES))
    return [math.exp(normal.inv_cdf(rank ** (1 / count))) for rank in ranks]


@dataclass(frozen=True)
class _Setting:
    """A model on a cluster of N members: workers, or nodes of L workers.

    Between nodes each worker averages an L-th of every part, and has an L-th of the link. The node
    gathers the result inside, where the links are assumed to be faster, when the part lands.

    Attributes:
        links: The links of the members.
        inside: The links of the workers of a member.
        model_bytes: M.
        step_seconds: t.
        jitter: Standard deviation of the compute time relative to t; log-normal.
    """

    links: _Links
    inside: _Links
    model_bytes: float
    step_seconds: float
    jitter: float

    @cached_property
    def step(self) -> tuple[float, float]:
        """Mean and standard deviation of the seconds of a step of one member alone.

        The step of a node ends when its gradients are averaged.
        """
        seconds, mean, deviation = self.step_seconds, 1.0, self.jitter
        if self.inside.size == 1:
            return seconds, seconds * deviation
        values = _slowest(self.inside.size, deviation)
        mean = fmean(values)
        deviation = math.sqrt(fmean((value - mean) ** 2 for value in values))
        averaged = self.inside.overlapped(seconds, self.model_bytes, "float32")
        return seconds * mean + averaged - seconds, seconds * deviation

    def landing(self, size: float) -> float:
        """Return the seconds in which a node gathers a part of ``size`` bytes that has arrived."""
        workers = self.inside.size
        return 0.0 if workers == 1 else self.inside.gather(size / workers)

    def scheduled(self, every: float, flight: float, cost: float, landing: float) -> float:
        """Return the mean seconds of a step if a mean starts every h steps and ends k steps later.

        A worker waits if the mean has not arrived k steps after its start. One mean after the
        other uses the link. This is computed for many cycles of h steps with random durations.

        Args:
            every: h.
            flight: k, or 0 if workers wait for each mean.
            cost: Seconds of a mean on the link.
            landing: Seconds of a landing.
        """
        mean, deviation = self.step
        size = self.links.size if deviation else 1
        random = np.random.default_rng(0)

        def draw(count: float) -> Any:
            """Return the seconds of ``count`` steps of each member."""
            variance = math.log1p((deviation / mean) ** 2 / count) if count else 0.0
            drawn = random.lognormal(-variance / 2, math.sqrt(variance), size)
            return count * mean * drawn

        # A mean that is in flight at several later starts lands ``steps`` steps after the last one.
        passed = max(1, math.ceil(flight / every)) - 1
        steps = flight - passed * every
        cycles = max(20, min(_CYCLES, _MOST_DRAWS // size))
        settled = cycles // 4
        started = np.zeros(size)  # time of each member's newest start
        ends = [0.0]  # time at which each mean has arrived
        drift = begin = 0.0
        for number in range(cycles):
            if number == settled:
                begin, drift = float(started.mean()), 0.0
            ends.append(max(ends[-1], float(started.max())) + cost)
            before, after = draw(steps), draw(every - steps)
            due = ends[max(0, len(ends) - 1 - passed)]
            started = np.maximum(started + before, due) + landing + after
            drift += float(before.mean() + after.mean()) - every * mean
        seconds = (float(started.mean()) - begin - drift) / (cycles - settled)
        return max(seconds, cost) / every  # a queue of means may grow slowly


def _forecast(strategy: Strategy, wire: str, setting: _Setting) -> tuple[float, float, float]:
    """Return the seconds of a step, the steps between two means, and the bytes per step."""
    links, size = setting.links, setting.model_bytes
    if links.size == 1:
        return setting.step[0], math.inf, 0.0
    if isinstance(strategy, StreamingAveraging):
        return _streaming(strategy, wire, setting)
    more = {"selsync": 2, "async": int(getattr(strategy, "schedule", "") == "eager")}
    numbers = (_VOTE_BYTES + 8 * more.get(strategy.name, 0)) * setting.inside.size
    votes = links.gather(numbers)
    parts = strategy.fragments if isinstance(strategy, DiLoCo) else 1
    seconds, sent = links.sum(size / parts, wire, parts=1)
    cost, sent, landing = votes + seconds, sent + numbers, setting.landing(size / parts)
    match strategy:
        case BSP():
            sent = numbers + setting.inside.size * links.sum(size, wire)[1]
            return _bsp(wire, setting), 1, sent
        case LocalSGD(period=period):
            return setting.scheduled(period, 0, cost, landing), period, sent / period
        case SelSync():
            assert strategy.target_lssr is not None
            every = min(1 / (1 - strategy.target_lssr), strategy.max_interval or math.inf)
            sent = numbers + (sent - numbers) / every
            if strategy.flags == "deferred":  # the votes of a step arrive during the next one
                return setting.scheduled(every, 0, cost, landing), every, sent
            mean = cost - votes + landing
            return setting.scheduled(1, 0, votes, 0) + mean / every, every, sent
        case DiLoCo(period=period, overlap=overlap):
            every = period / parts
            return setting.scheduled(every, overlap, cost, landing), period, sent / every
        case AsyncAveraging(schedule="cyclic"):
            every = strategy.staleness / 2
            return setting.scheduled(every, every, cost, landing), every, sent / every
        case AsyncAveraging():
            step, every = _clocked(cost, landing, strategy.averages(), setting)
            return step, every, sent / every
    raise AssertionError(strategy)


def _bsp(wire: str, setting: _Setting) -> float:
    inside = setting.inside.size
    # All workers average their gradients with each other, also in nodes.
    links = replace(setting.links, size=setting.links.size * inside, shared=inside)
    return fmean(
        links.overlapped(setting.step_seconds * time, setting.model_bytes, wire)
        for time in _slowest(links.size, setting.jitter)
    )


def _clocked(
    cost: float, landing: float, shared: SharedModel, setting: _Setting
) -> tuple[float, float]:
    """Return the seconds of a step, and the steps between launches, of self-clocked messages.

    A message takes ``cost`` seconds, and ``landing`` seconds to land. It lands at the end of the
    step in which it arrives, and the next one is launched. A worker waits for a message that
    arrives soon after the end of a step, at most for the share of its time that its patience
    allows, and at the bound on the staleness in any case. With jitter it is assumed to wait for
    half of its patience, if messages take long.
    """
    step, deviation = setting.step
    if setting.inside.size > 1:  # the workers of a node agree in each step on what has arrived
        step += setting.inside.all_reduce(8 * 4)
    flight = cost / step
    early, late = max(1, math.floor(flight)), max(1, math.ceil(flight * (1 - _TINY)))
    allowance = waited = fresh = launched = first = 0.0
    for message in range(2 * _MESSAGES):
        if message == _MESSAGES:
            first, waited = launched, 0.0
        steps, allowance = float(late), min(1.0, allowance + shared.patience * early)
        if early < late and flight <= early + allowance:
            steps, allowance = early, allowance - (flight - early)
        steps = max(0.0, min(steps, fresh + shared.bound - launched))
        waited += max(0.0, flight - steps)
        fresh, launched = launched, launched + steps
    least = shared.patience / 2 if deviation and flight > 0.5 else 0.0
    interval = (launched - first) / _MESSAGES
    return step * (1 + max(least, waited / (launched - first))) + landing / interval, interval


def _streaming(
    strategy: StreamingAveraging, wire: str, setting: _Setting
) -> tuple[float, float, float]:
    """Forecast streaming averaging.

    In the eager schedule a message has the number of parts for which a worker's knowledge is
    youngest, as in ``averaging/pace.py``.
    """
    links, step = setting.links, setting.step[0]
    inside = setting.inside.size
    vote = (_VOTE_BYTES + 8 * (4 if strategy.schedule == "eager" else 3)) * inside
    number = (shared := strategy.averages()).parts
    parts = number(round(setting.model_bytes / inside)) if callable(number) else number
    size = setting.model_bytes / parts
    if strategy.schedule == "cyclic":
        cycle = strategy.staleness // 2
        every, count = max(1, cycle // parts), math.ceil(parts / min(parts, cycle))
        part, sent = links.sum(size, wire, parts=1)
        cost, landing = links.gather(vote) + count * part, setting.landing(count * size)
        interval = every * parts / count
        step = setting.scheduled(every, cycle, cost, landing)
        return step, interval, (vote + count * sent) / every

    def message(count: int) -> tuple[float, float]:
        return links.sum(size, wire, parts=count, vote=vote)

    def age(count: int) -> float:
        flight = max(1, math.ceil(message(count)[0] / step + _SIZER_SLACK))
        if count > 1 and flight > shared.bound:
            return math.inf
        return flight * (1 + parts / (2 * count))

    count = min(range(1, parts + 1), key=age)
    cost, sent = message(count)
    step, interval = _clocked(cost, setting.landing(count * size), shared, setting)
    return step, interval * parts / count, sent / interval


# -- the function ----------------------------------------------------------------------------------


def plan(
    *,
    parameters: float | str,
    step_time: float | str,
    workers: int,
    bandwidth: float | str,
    latency: float | str = "100us",
    jitter: float = 0.0,
    strategies: Sequence[str] | None = None,
    workers_per_node: int = 1,
    inside: float | str | None = None,
    inside_latency: float | str | None = None,
) -> Plan:
    """Predict the time of a step under each strategy, and recommend a strategy.

    The figures describe the steady state, without warm-up. The tests hold them to within 2 % of the
    simulator, or 5 % with jitter. Under an eager schedule they hold the steps between two means to
    within 10 % without jitter. With jitter these are more than predicted. If a message takes longer
    than the bound on the staleness, a step may differ by 6 %.

    *Not modelled*: the final metric; the arithmetic of sums and codecs; buffers; means of
    optimizers' states; workers that are always slower than others; and other traffic on the
    network. Backward takes twice as long as forward, and completes gradients at a constant rate.
    Jitter is log-normal and independent between steps and workers.

    **Recommendation**, by the share of the time that DDP (BSP) would wait:

    1. below 5 %: ``bsp``, so DDP;
    2. above that, if a message takes longer than a step: ``streaming --wire int4``;
    3. up to 90 %: ``streaming``, the default;
    4. above: none. Compare on your own model.

    **Nodes** of several workers train as with ``attach(..., node_group=…)``. A node's step ends
    when the mean of its gradients has arrived. The idle share counts only the waiting for other
    nodes, as in ``Stats``. The throughput accounts for all waiting.

    Args:
        parameters: Number of averaged parameters, like 25e6 or "25M".
        step_time: Compute time t of a step without communication: seconds, or text like "50ms".
        workers: Number of workers (≥ 1).
        bandwidth: Bandwidth of each worker's link in each direction: bits per second, or text like
            "1Gbit/s".
        latency: Latency of a message: seconds, or text like "100us" (≥ 0).
        jitter: Standard deviation of the compute time relative to t, in [0, 1].
        strategies: Strategies to forecast in place of the default ones, as text, with a precision
            if it is not the default: ["local:period=4", "bsp --wire int8"].
        workers_per_node: Number of workers per node, L (≥ 1), a divisor of ``workers``. With L > 1,
            ``bandwidth`` and ``latency`` describe the link of a node, which its workers share.
        inside: Bandwidth of each worker's link inside its node, in each direction; None means
            "100Gbit/s".
        inside_latency: Latency of a message inside a node; None means "10us".

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: A value is out of its range; ``workers_per_node`` does not divide ``workers``;
            or ``strategies`` is empty or contains a strategy without a formula.
    """
    count, seconds = to_count(parameters), to_seconds(step_time)
    require_integer("workers", workers, least=1)
    require_integer("workers_per_node", workers_per_node, least=1)
    if workers % workers_per_node:
        raise ValueError(
            f"workers={workers} do not fill nodes of workers_per_node={workers_per_node}"
        )
    require_number("jitter", jitter, Range(least=0, most=1, hint="0.1 for 10 % of a step"))
    if workers_per_node == 1 and (inside is not None or inside_latency is not None):
        raise ValueError("inside needs nodes of several workers: give workers_per_node")
    rate, delay = to_bandwidth(bandwidth), to_seconds(latency, allow_zero=True)
    within = to_bandwidth("100Gbit/s" if inside is None else inside)
    short = to_seconds("10us" if inside_latency is None else inside_latency, allow_zero=True)
    links = _Links(workers // workers_per_node, rate / 8, delay)
    local = _Links(workers_per_node, within / 8, short)
    setting = _Setting(links, local, 4 * count, seconds, float(jitter))
    nodes = ""
    if workers_per_node > 1:
        nodes = (
            f" between nodes of {workers_per_node} with {show_bandwidth(within)}, latency "
            f"{show_seconds(short)}, which step every {show_seconds(setting.step[0])} alone"
        )

    def row(strategy: Strategy, wire: Precision) -> Forecast:
        step, interval, payload = _forecast(strategy, wire, setting)
        return Forecast(
            strategy=f"{strategy}" + ("" if wire == strategy.default_wire else f" --wire {wire}"),
            wire=wire,
            step_seconds=step,
            throughput=workers * seconds / step,
            idle=min(1.0, max(0.0, 1 - setting.step[0] / step)),
            interval_steps=interval,
            payload_bytes=payload / workers_per_node,
        )

    long_latency = links.latency > seconds
    if strategies is None:
        strategies = [*DEFAULT_ROWS, *([LONG_LATENCY_ROW] if long_latency else [])]
    elif isinstance(strategies, str) or not strategies:
        raise ValueError(
            f'strategies must be a list like ["bsp", "local:period=8"], got {strategies!r}'
        )
    rows = tuple(row(*_read(text)) for text in strategies)
    recommendation, reason = _recommend(row(BSP(), "float32"), links.size == 1, long_latency)
    send_steps = 4 * count / links.rate / seconds
    varies = f" ± {100 * jitter:g} %" if jitter else ""
    caption = (
        f"{count:,.0f} parameters ({show_bytes(4 * count)}), {show_seconds(seconds)}{varies} a "
        f"step, {workers} workers, {show_bandwidth(8 * links.rate)}, latency "
        f"{show_seconds(links.latency)}{nodes}; predicted, not measured"
    )
    return Plan(
        caption=caption,
        model_bytes=4 * count,
        send_steps=send_steps,
        rows=rows,
        recommendation=recommendation,
        reason=reason,
        warning=_beyond(count, workers, send_steps),
    )


_OWN = {
    kind.name: kind for kind in (BSP, LocalSGD, SelSync, AsyncAveraging, StreamingAveraging, DiLoCo)
}
"""Strategies with a formula, by name."""


def _read(text: str) -> tuple[Strategy, Precision]:
    """Return the strategy and the precision of a row. Raise if there is no formula for it."""
    if not isinstance(text, str):
        raise TypeError(f"a strategy is text like local:period=8, got {text!r}")
    shown, _, wire = text.strip().partition(" --wire ")
    name = shown.partition(":")[0]
    if name not in _OWN:
        raise ValueError(
            f"plan has formulas for {', '.join(_OWN)}, and none for {shown}"
            f"{did_you_mean(name, _OWN)}: run a baseline or a strategy of your own with "
            "offbeat compare --simulate"
        )
    strategy = parse_strategy(shown)
    if isinstance(strategy, SelSync) and strategy.target_lssr is None:
        raise ValueError(
            f"plan needs target_lssr, as in selsync:target_lssr=0.9: how often {strategy} "
            "synchronizes follows from the gradients. Or run it with offbeat compare --simulate"
        )
    if not wire:
        return strategy, strategy.default_wire
    require_choice("--wire", wire.strip(), ("float32", *BLOCK_BYTES))
    return strategy, cast(Precision, wire.strip())
