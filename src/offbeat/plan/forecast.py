"""A row of a plan: the figures of one strategy, taken from a run in steady state."""

import math
from dataclasses import dataclass, replace
from typing import Any

from offbeat.plan.play import Setting, play
from offbeat.plan.steady import MOST_SECONDS, Watch
from offbeat.quantization.wire import Precision
from offbeat.strategies import Strategy
from offbeat.units import show_seconds

FAR_APART = 64
"""Steps; a forecast whose workers go further apart says so."""
_NOTHING = 0.0005  # of the time: shown as 0.0 %


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What one strategy would do.

    Attributes:
        strategy: Text form, as ``offbeat.parse_strategy`` reads it.
        wire: How means travel; where the strategy chooses, what it chose last.
        step_seconds: Mean time from one step to the next, computing and waiting.
        throughput: Samples a second, relative to one worker alone; N at best.
        idle: Share of the time spent waiting, in [0, 1]; for other nodes, where there are some.
        apart_steps: The most own steps of a worker between two means that reach the same parameter,
            or the staleness that the strategy reports, if that is more. 0 if gradients are averaged
            in every step, ``inf`` if there was no mean.
        payload_bytes: Bytes a step that a worker hands to operations, as in ``Stats``.
        memory_bytes: The most live tensors on top of model, gradients and optimizer.
        busy: Share of the time in which the worker's link is busy, in [0, 1].
        steady: False if the run was ended before its figures were certain to ± 1 %.
        note: What happens, in words.
    """

    strategy: str
    wire: Precision
    step_seconds: float
    throughput: float
    idle: float
    apart_steps: float
    payload_bytes: float
    memory_bytes: float
    busy: float
    steady: bool
    note: str


@dataclass(frozen=True)
class Measured:
    """A forecast, and what else the run has told.

    Attributes:
        forecast: The forecast.
        details: ``Stats.details`` at the end.
        pass_steps: Own steps between two means that reach the same parameter, on average; ``inf``
            if none does.
        step_seconds: Of a step without waiting for other nodes.
    """

    forecast: Forecast
    details: dict[str, Any]
    pass_steps: float
    step_seconds: float


def measure(
    strategy: Strategy,
    wire: Precision,
    setting: Setting,
    *,
    text: str | None = None,
    most_seconds: float = MOST_SECONDS,
) -> Measured:
    """Run ``strategy`` until it is steady.

    Args:
        strategy: The strategy.
        wire: A precision, or "auto" for a strategy that chooses.
        setting: Model and cluster.
        text: What the row is called; None is the text form.
        most_seconds: Seconds of processor, after which the run ends.
    """
    watch = Watch(jitter=setting.jitter > 0, alone=setting.alone, most_seconds=most_seconds)
    record = play(_warmed_up(strategy), wire, setting, watch.ended)
    window = watch.window
    steps = window.last - window.first
    begin, end = record.steps[window.first - 1], record.steps[window.last - 1]
    seconds, computed, busy, payload = (
        (getattr(end, name) - getattr(begin, name)) / steps
        for name in ("clock", "computed", "busy", "payload")
    )
    if setting.jitter:  # steps that were drawn longer than they are on average count as average
        seconds, computed = seconds - computed + setting.computing, setting.computing
    interval = steps / (end.syncs - begin.syncs) if end.syncs > begin.syncs else math.inf
    gaps = [gap for step, gap in record.gaps if step - gap >= window.first]
    apart = interval if interval > 1 else 0.0
    if gaps:
        apart = float(max(gaps))
    forecast = Forecast(
        strategy=text or str(strategy),
        wire=record.details.get("wire", wire),
        step_seconds=seconds,
        throughput=setting.workers * setting.step_seconds / seconds,
        idle=min(1.0, max(0.0, 1 - computed / seconds)),
        apart_steps=max(apart, float(record.details.get("staleness_max", 0))),
        payload_bytes=0.0 if setting.alone else payload,
        memory_bytes=record.memory + setting.node_bytes,
        busy=min(1.0, busy / seconds),
        steady=window.steady,
        note="",
    )
    passes = sum(gaps) / len(gaps) if gaps else math.inf
    note = _note(forecast, record.details, interval, passes, setting)
    return Measured(replace(forecast, note=note), record.details, passes, computed)


def _warmed_up(strategy: Strategy) -> Strategy:
    """The strategy without its warm-up steps, of which a steady state knows nothing."""
    shorter: Any = {"warmup_steps": 0}
    return replace(strategy, **shorter) if getattr(strategy, "warmup_steps", 0) else strategy


def _note(
    forecast: Forecast,
    details: dict[str, Any],
    interval: float,
    passes: float,
    setting: Setting,
) -> str:
    """What comes of a strategy: how often means are taken, and what is waited for."""
    if setting.alone:
        return "nobody to wait for"
    told = [f"{_means(forecast, details, interval, passes, setting)}"]
    told.append(f"the link is busy {percent(forecast.busy)} of the time")
    waited = forecast.idle * forecast.step_seconds
    if forecast.idle >= _NOTHING:
        each = 1 if interval == math.inf or "staleness_max" in details else interval
        what = "step" if each == 1 else "mean"
        told[-1] += f", workers wait {show_seconds(waited * each)} for each {what}"
    if forecast.apart_steps > FAR_APART:
        told.append(f"{number(forecast.apart_steps)} steps apart, watch the final metric")
    if not forecast.steady:
        told.append("not steady when the run was ended")
    return "; ".join(told)


def _means(
    forecast: Forecast,
    details: dict[str, Any],
    interval: float,
    passes: float,
    setting: Setting,
) -> str:
    if interval == math.inf:
        return "no mean"
    parts = details.get("parts", 1)
    if "landing_seconds" in details and (parts > 1 or "outer_gain" in details):
        count = f"{parts} part{'s' * (parts > 1)}"
        return f"{count} in {forecast.wire}, the whole model {every(passes)}"
    if "landing_seconds" in details:
        took = details["landing_seconds"] / setting.step_seconds
        return f"a mean {every(interval)}, in flight for {number(took)}"
    if passes < math.inf and passes > 1.5 * interval:
        return f"a part of the model {every(interval)}, the whole of it {every(passes)}"
    return f"a mean {every(interval)}"


def every(steps: float) -> str:
    """``"in each step"`` from 1, ``"every 8 steps"`` from 8."""
    shown = number(steps)
    return "in each step" if shown == "1" else f"every {shown} steps"


def number(value: float) -> str:
    """Three digits, and all that are before the point."""
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"


def percent(share: float) -> str:
    """``"4.9 %"`` from 0.049."""
    value = 100 * share
    return f"{value:.1f} %" if 0.05 <= value < 9.95 else f"{value:.0f} %"
