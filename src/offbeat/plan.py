"""The planner: predicts the time of a training step under each strategy, and recommends one.

The forecasts are formulas. The tests compare them with the simulator (``offbeat.simulate``), which
runs the code of the strategies. A plan predicts time and traffic. It does not predict the final
metric, which only training shows.

Symbols: N workers; M bytes of the model in float32; t seconds of a step without communication; α
seconds of latency; B bytes per second of a link. The collectives take as long as in the simulator:

* all-reduce of m bytes: 2(N−1)·(α + m/(N·B))
* all-gather of m bytes: α + (N−1)·m/B
* all-to-all of m bytes: α + (N−1)·m/(N·B)

This module imports neither torch nor the simulator, so that ``offbeat plan`` answers at once.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

from offbeat.arguments import Precision, did_you_mean, require_choice, require_integer
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
from offbeat.strategies.base import GlobalModel, WorkerView
from offbeat.strategies.registry import STRATEGIES, parse_strategy
from offbeat.units import (
    show_bandwidth,
    show_bytes,
    show_seconds,
    to_bandwidth,
    to_bytes,
    to_count,
    to_seconds,
)

# -- the rule --------------------------------------------------------------------------------------
# README.md and docs/choosing.md show the same rule as a table, and docs/evidence.md its reasons.

LEAST_WAITING = 0.05
"""Share of the time that DDP waits, from which the default strategy is recommended."""
MEASURED_SEND_STEPS = 33.0
"""Largest S at which the default strategy was measured to reach 90 % of the ideal's improvement in
at most 1.07 times the ideal's time, with a CNN and with a transformer."""
MEASURED_PARAMETERS, MEASURED_WORKERS = 550_000, 4
"""Largest model and largest number of workers for which this holds."""

DEFAULT_ROWS = (
    *("bsp", "bsp --wire int4", "local:period=2 --wire int4", "local:period=8"),
    *("selsync:target_lssr=0.9", "async", "streaming"),
)
LONG_LATENCY_ROW = "streaming:staleness=3"


def _recommend(bsp: "Forecast", alone: bool, long_latency: bool) -> tuple[str, str]:
    """Return the text form of the strategy to try first, and the reason."""
    waits = f"DDP would wait {percent(bsp.idle)} of the time"
    if alone:
        return BSP.name, "a single worker waits for no other"
    if bsp.idle < LEAST_WAITING:
        return BSP.name, f"{waits}, so stay with DDP"
    if long_latency:
        return LONG_LATENCY_ROW, f"{waits}, and a message takes longer than a step"
    return StreamingAveraging.name, waits


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
        idle: Share of the time that a worker waits for others, in [0, 1].
        interval_steps: Mean number of steps between two means of the same parameter; ``inf`` for a
            single worker.
        payload_bytes: Bytes per step that a worker passes to operations, as in ``Stats``; 0 for a
            single worker.
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
        recommendation: Text form of the strategy to try first.
        reason: Text that explains the recommendation.
        warning: Text that says in what the setting is beyond the measured ones; empty if in
            nothing.
        memory: Text that says what fits into the memory; empty if its size was not given.
    """

    caption: str
    model_bytes: float
    send_steps: float
    rows: tuple[Forecast, ...]
    recommendation: str
    reason: str
    warning: str
    memory: str = ""

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
        lines = [
            f"S = {_number(self.send_steps)}: a link needs {_steps(self.send_steps)} to send the "
            "model once in float32.",
            f"Try {self.recommendation} first: {self.reason}.",
        ]
        if self.recommendation != BSP.name:
            lines.append(
                "If the last percent of the metric counts, compare it with bsp --wire int4, which "
                "averages in every step."
            )
            lines += [f"Warning: {self.warning}."] if self.warning else []
        return lines + ([f"Memory: {self.memory}."] if self.memory else [])


def _beyond(parameters: float, workers: int, send_steps: float) -> str:
    """Return text that says in what a setting is beyond the measured ones; empty if in nothing."""
    measured = {
        f"S up to {MEASURED_SEND_STEPS:g}": send_steps <= MEASURED_SEND_STEPS,
        "models of up to 0.5 million parameters": parameters <= MEASURED_PARAMETERS,
        f"up to {MEASURED_WORKERS} workers": workers <= MEASURED_WORKERS,
    }
    found = ", ".join(text for text, within in measured.items() if not within)
    return f"this is beyond what was measured ({found}), so compare on your model" if found else ""


_SAVED_BYTES = {"float32": 0, "bfloat16": 2, "host": 4}  # per parameter, with AdamW


def memory_bytes(parameters: float, workers: int, stored: str = "float32") -> float:
    """Return the most bytes that training takes on the device of a worker, without activations.

    The parameters are float32, the optimizer is AdamW or SGD with momentum, and the strategy
    streaming averaging with the setting ``stored``. docs/streaming.md has the terms: parameters,
    gradients, optimizer, P and v take 20 bytes per parameter. The others are those of a message
    with the whole model: the change of the local model and the quantized updates. With AdamW there
    is no v. With SGD, P and v in host memory save 8 bytes, but AdamW then needs more.
    """
    if workers == 1:
        return 16 * parameters
    message = 0.26 * (workers + 1) if workers <= 3 else 0.26 * 4 + 4 / workers
    return (24 - _SAVED_BYTES[stored] + message) * parameters


def _memory(parameters: float, workers: int, available: float) -> str:
    """Return whether ``memory_bytes`` fits into so many bytes, as text."""
    needed = memory_bytes(parameters, workers)
    left = available - needed
    answer = (
        f"which leaves {show_bytes(left)} of {show_bytes(available)} for activations"
        if left > 0
        else f"more than the {show_bytes(available)}, and activations are extra"
    )
    alone = show_bytes(16 * parameters)
    text = (
        f"AdamW in float32 takes {alone}, and up to {show_bytes(needed)} with streaming, {answer}"
    )
    if workers > 1:
        half, host = (
            show_bytes(memory_bytes(parameters, workers, s)) for s in ("bfloat16", "host")
        )
        text += f"; streaming:outer_gain=1,stored=bfloat16 takes up to {half}, stored=host {host}"
    return text


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
BLOCK_BYTES = {"int8": 516, "int4": 260, "int2": 108}  # of one encoded block
_SINGLE_STAGE_WORKERS = 2  # ``quantization/message.py``
_FORWARD_SHARE = 1 / 3  # ``training/backward_hooks.py``
_VOTE_NUMBERS = 8  # without the numbers of a strategy
_SIZER_SLACK = 0.1  # ``averaging/pace.py``
_AGREEMENT_BYTES = 8 * 64  # with the gradients: votes, and a number per tensor
_TINY = 1e-9  # rounding error of a number of steps


@dataclass(frozen=True)
class _Setting:
    """N workers train a model of M bytes in steps of t seconds, over links with α and B."""

    workers: int
    model: float
    step: float
    latency: float
    rate: float

    def all_reduce(self, size: float) -> float:
        """Return the seconds of an all-reduce of ``size`` bytes."""
        return 2 * (self.workers - 1) * (self.latency + size / (self.workers * self.rate))

    def gather(self, size: float) -> float:
        """Return the seconds of an all-gather of ``size`` bytes from each worker."""
        return self.latency + (self.workers - 1) * size / self.rate

    def sum(self, size: float, wire: str, *, parts: int = 0, vote: int = 0) -> tuple[float, float]:
        """Return the seconds on the link, and the bytes passed to operations, of a sum.

        A quantized sum is an all-to-all and an all-gather, or between two workers a single
        all-gather. Where quantization, which pads to blocks, would save no bytes, it is exact.

        Args:
            size: Bytes in float32, of one part.
            wire: Precision.
            parts: Number of parts of a model in the message. 0: gradients are summed.
            vote: Bytes of a vote, which is part of each row of a quantized message.
        """
        block, count = BLOCK_BYTES.get(wire, math.inf), max(1, parts)
        chunk = math.ceil(size / 4 / (BLOCK * self.workers)) * block  # of each worker
        if wire == "float32" or self.workers * chunk >= size:
            votes = self.gather(vote) if vote else 0.0
            return count * self.all_reduce(size) + votes, count * size + vote
        if parts and self.workers <= _SINGLE_STAGE_WORKERS:
            sent = parts * math.ceil(size / 4 / BLOCK) * block + vote
            return self.gather(sent), sent
        # In an all-to-all of N chunks, as many bytes arrive as in an all-gather of a chunk.
        chunk *= count
        sent = self.workers * (chunk + vote) + chunk
        return self.gather(chunk + vote) + self.gather(chunk), sent

    # -- time of a step --------------------------------------------------------------------------

    def in_backward(self, wire: str) -> float:
        """Return the seconds of a step that averages gradients in buckets during backward.

        Gradients are completed at a constant rate. The link sends one bucket after the other. The
        workers agree on the gradients before the last bucket.
        """
        end, left, bucket = 0.0, self.model, FIRST_BUCKET_BYTES
        while left > 0:
            size = min(bucket, left)
            left -= size
            ready = self.step * (1 - (1 - _FORWARD_SHARE) * left / self.model)
            agreement = 0.0 if left else self.gather(_AGREEMENT_BYTES)
            end = max(end, ready) + agreement + self.sum(size, wire)[0]
            bucket = BUCKET_BYTES
        return end

    def scheduled(self, every: float, overlap: float, cost: float) -> float:
        """Return the seconds of a step, if a mean that takes ``cost`` seconds starts periodically.

        A mean starts after ``every`` steps, and workers wait for it ``overlap`` steps later. Other
        means may start in between. The link sends one mean after the other.
        """
        in_flight = max(1, math.ceil(overlap / every))
        waited = (cost - overlap * self.step) / (in_flight * every)
        return max(self.step, self.step + waited, cost / every)

    def on_arrival(self, cost: float, shared: GlobalModel) -> tuple[float, float]:
        """Return the seconds of a step, and the steps between launches, with ``lands="arrived"``.

        A message takes ``cost`` seconds. It lands at the end of the step in which it arrives, and
        the next message is launched. Workers wait at the end of a step for a message that is about
        to arrive, at most for the share ``patience`` of the time. They also wait so that two
        consecutive messages take at most ``bound`` steps.
        """
        flight = cost / self.step
        early, late = max(1, math.floor(flight)), max(1, math.ceil(flight * (1 - _TINY)))
        saved = late - flight if early < late else 0.0  # steps, by a wait after ``early`` steps
        waits = shared.patience * early / (1 - saved) if saved else 0.0  # per message
        steps, time = late - min(1.0, waits), late - min(1.0, waits) * saved
        if 2 * steps > shared.bound:  # every other message has arrived before the step ends
            longer = late - min(1.0, 2 * waits) * saved
            second = min(longer, max(flight, math.ceil(shared.bound / 2)))
            steps, time = shared.bound / 2, (flight + second) / 2
        return self.step * (time / steps), steps


def _forecast(strategy: Strategy, wire: str, setting: _Setting) -> tuple[float, float, float]:
    """Return the seconds of a step, the steps between two means, and the bytes per step."""
    if setting.workers == 1:
        return setting.step, math.inf, 0.0
    size, shared = setting.model, strategy.averages()
    if not isinstance(shared, GlobalModel):  # a mean of gradients takes as long as one of models
        shared = GlobalModel()
    vote = 8 * (_VOTE_NUMBERS + len(strategy.vote(WorkerView(stepping=False))) + shared.eager)
    parts = shared.parts(round(size)) if callable(shared.parts) else shared.parts
    votes, (part, part_bytes) = setting.gather(vote), setting.sum(size / parts, wire, parts=1)
    if shared.lands == "arrived":

        def message(count: int) -> tuple[float, float]:
            return setting.sum(size / parts, wire, parts=count, vote=vote)

        # As in ``averaging/pace.py``: ⌈time⌉ of messages in steps, by their number of parts.
        flights = {
            count: max(1, math.ceil(message(count)[0] / setting.step + _SIZER_SLACK))
            for count in range(1, parts + 1)
        }
        fits = [one for one, steps in flights.items() if steps <= max(shared.bound, flights[1])]
        count = min(fits, key=lambda one: flights[one] * (1 + parts / (2 * one)))
        cost, sent = message(count)
        step, every = setting.on_arrival(cost, shared)
        return step, every * parts / count, sent / every
    every, count = 1.0, 1  # steps between two rounds, and parts in each
    match strategy:
        case BSP():
            return setting.in_backward(wire), 1, vote + setting.sum(size, wire)[1]
        case SelSync():
            assert strategy.target_lssr is not None
            every = min(1 / (1 - strategy.target_lssr), strategy.max_interval or math.inf)
            step = setting.step + votes + part / every
            return step, every, vote + part_bytes / every
        case LocalSGD(period=period) | DiLoCo(period=period):
            every = period / parts
        case AsyncAveraging():
            every = shared.lands
        case StreamingAveraging():
            every = max(1, shared.lands // parts)
            count = math.ceil(parts / min(parts, shared.lands))
    step = setting.scheduled(every, shared.lands, votes + count * part)
    return step, every * parts / count, (vote + count * part_bytes) / every


# -- the function ----------------------------------------------------------------------------------


def plan(
    *,
    parameters: float | str,
    step_time: float | str,
    workers: int,
    bandwidth: float | str,
    latency: float | str = "100us",
    strategies: Sequence[str] | None = None,
    device_memory: float | str | None = None,
) -> Plan:
    """Predict the time of a step under each strategy, and recommend a strategy.

    The figures describe the steady state, without warm-up. The tests hold them to within 2 % of the
    simulator. Under an eager schedule they hold the steps between two means to within 5 %, and with
    a long ``patience`` a step may differ by 8 %. A table in docs/choosing.md has the rule of the
    recommendation.

    *Not modelled*: the final metric; stragglers, which ``offbeat compare --simulate`` shows; the
    arithmetic of sums and codecs; buffers; and other traffic on the network. All steps take equally
    long, and backward takes twice as long as forward. Eager schedules with a staleness of 1 have no
    formula, and are refused.

    **Nodes.** With ``attach(..., node_group=…)`` give the number of nodes as ``workers``, the step
    of a node as ``step_time``, which includes the mean of the gradients inside, and the link of a
    node as ``bandwidth``.

    Args:
        parameters: Number of averaged parameters, like 25e6 or "25M".
        step_time: Compute time t of a step without communication: seconds, or text like "50ms".
        workers: Number of workers (≥ 1).
        bandwidth: Bandwidth of each worker's link in each direction: bits per second, or text like
            "1Gbit/s".
        latency: Latency of a message: seconds, or text like "100us" (≥ 0).
        strategies: Strategies to forecast in place of the default ones, as text, with a precision
            if it is not the default: ["local:period=4", "bsp --wire int8"].
        device_memory: Memory of the device: bytes, or text like "80GB". None: ``Plan.memory`` is
            empty.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: A value is out of its range, or ``strategies`` is empty or contains a strategy
            without a formula.
    """
    count, step, rate = to_count(parameters), to_seconds(step_time), to_bandwidth(bandwidth) / 8
    require_integer("workers", workers, least=1)
    setting = _Setting(workers, 4 * count, step, to_seconds(latency, allow_zero=True), rate)
    long_latency = setting.latency > step
    if strategies is None:
        strategies = [*DEFAULT_ROWS, *([LONG_LATENCY_ROW] if long_latency else [])]
    elif isinstance(strategies, str) or not strategies:
        raise ValueError(
            f'strategies must be a list like ["bsp", "local:period=8"], got {strategies!r}'
        )
    recommendation, reason = _recommend(_row("bsp", setting), workers == 1, long_latency)
    send_steps = setting.model / rate / step
    caption = (
        f"{count:,.0f} parameters ({show_bytes(setting.model)}), {show_seconds(step)} a step, "
        f"{workers} workers, {show_bandwidth(8 * rate)}, latency {show_seconds(setting.latency)}; "
        "predicted, not measured"
    )
    return Plan(
        caption=caption,
        model_bytes=setting.model,
        send_steps=send_steps,
        rows=tuple(_row(text, setting) for text in strategies),
        recommendation=recommendation,
        reason=reason,
        warning=_beyond(count, workers, send_steps),
        memory="" if device_memory is None else _memory(count, workers, to_bytes(device_memory)),
    )


def _row(text: str, setting: _Setting) -> Forecast:
    """Return the figures of a strategy and precision. Raise if there is no formula for it."""
    if not isinstance(text, str):
        raise TypeError(f"a strategy is text like local:period=8, got {text!r}")
    shown, _, given = text.strip().partition(" --wire ")
    name = shown.partition(":")[0]
    if name not in STRATEGIES:
        raise ValueError(
            f"plan has formulas for {', '.join(STRATEGIES)}, and none for {shown}"
            f"{did_you_mean(name, STRATEGIES)}: run a baseline or a strategy of your own with "
            "offbeat compare --simulate"
        )
    strategy = parse_strategy(shown)
    if isinstance(strategy, SelSync) and strategy.target_lssr is None:
        raise ValueError(
            f"plan needs target_lssr, as in selsync:target_lssr=0.9: how often {strategy} "
            "synchronizes follows from the gradients. Or run it with offbeat compare --simulate"
        )
    if getattr(strategy, "schedule", None) == "eager" and getattr(strategy, "staleness", None) == 1:
        raise ValueError(
            f"plan has no formula for {strategy}: give a staleness of 2 or more, or run it with "
            "offbeat compare --simulate"
        )
    wire = cast(Precision, given.strip() or strategy.default_wire)
    require_choice("--wire", wire, ("float32", *BLOCK_BYTES))
    step, interval, payload = _forecast(strategy, wire, setting)
    return Forecast(
        strategy=f"{strategy}" + ("" if wire == strategy.default_wire else f" --wire {wire}"),
        wire=wire,
        step_seconds=step,
        throughput=setting.workers * setting.step / step,
        idle=1 - setting.step / step,
        interval_steps=interval,
        payload_bytes=payload,
    )
