"""The forecast of one strategy: figures of a simulated run, if possible in its steady state."""

import math
from dataclasses import dataclass, replace
from typing import Any

from offbeat.plan.run import Setting, run
from offbeat.plan.steady_state import MOST_SECONDS, SteadyStateDetector
from offbeat.quantization.wire import Precision
from offbeat.strategies import Strategy
from offbeat.units import show_seconds

FAR_APART = 64
"""Number of steps between two means of a parameter above which a forecast warns."""
_LEAST_SHOWN = 0.0005  # smaller shares of the time would be shown as 0.0 %


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Predicted figures of one strategy.

    Attributes:
        strategy: Text form of the strategy, such as "local:period=8"; as given, if given as text.
        wire: Precision at which means are sent.
        step_seconds: Mean duration of a step, with waiting.
        throughput: Samples per second relative to a single worker. N workers reach N at best.
        idle: Share of the time that a worker waits for others, in [0, 1]. With nodes, only the
            waiting for other nodes.
        apart_steps: Largest number of steps between two means of the same parameter. If the
            strategy reports a larger staleness (age of the newest mean in the model, in steps), it
            counts instead. 0 if gradients are averaged in every step; ``inf`` without a mean.
        payload_bytes: Bytes per step that a worker passes to operations, as in ``Stats``; 0 for a
            single worker or node.
        memory_bytes: Largest size of the strategy's tensors in memory, without model, gradients and
            optimizer state.
        busy: Share of the time in which the worker's link is busy, in [0, 1].
        steady: False if the run reached its time limit before it was steady.
        note: Text that says how often means are taken and how long workers wait.
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
    """A forecast and further figures of the run from which it was made.

    Attributes:
        strategy: The strategy.
        forecast: The forecast.
        details: ``Stats.details`` at the end of the run.
        interval_steps: Mean number of steps between two means of any parameters; ``inf`` without a
            mean.
        pass_steps: Mean number of steps between two means of the same parameter; ``inf`` if no
            parameter was averaged twice. It exceeds ``interval_steps`` if a mean covers only a part
            of the model.
        step_seconds: Mean duration of a step without waiting for other workers or nodes.
    """

    strategy: Strategy
    forecast: Forecast
    details: dict[str, Any]
    interval_steps: float
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
    """Simulate training with ``strategy`` until it is steady or time is up. Return its figures.

    ``text`` replaces the text form of the strategy in the forecast. ``most_seconds`` limits the
    processor time of the run.
    """
    detector = SteadyStateDetector(
        jitter=setting.jitter > 0, alone=setting.alone, most_seconds=most_seconds
    )
    record = run(_without_warmup(strategy), wire, setting, detector.ended)
    window = detector.window
    steps = window.last - window.first
    begin, end = record.steps[window.first - 1], record.steps[window.last - 1]
    seconds, computed, busy, payload = (
        (getattr(end, name) - getattr(begin, name)) / steps
        for name in ("clock", "computed", "busy", "payload")
    )
    if setting.jitter:  # replace the mean of the drawn compute times by the expected value
        expected = setting.mean_step_seconds
        seconds, computed = seconds - computed + expected, expected
    interval = steps / (end.syncs - begin.syncs) if end.syncs > begin.syncs else math.inf
    gaps = [gap for step, gap in record.gaps if step - gap >= window.first]
    apart = interval if interval > 1 else 0.0
    if gaps:
        apart = float(max(gaps))
    forecast = Forecast(
        strategy=text or str(strategy),
        wire=wire,
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
    measured = Measured(strategy, forecast, record.details, interval, passes, computed)
    return replace(measured, forecast=replace(forecast, note=_note(measured, setting)))


def _without_warmup(strategy: Strategy) -> Strategy:
    """Return the strategy without warm-up steps, because they do not affect the steady state."""
    changes: Any = {"warmup_steps": 0}
    return replace(strategy, **changes) if getattr(strategy, "warmup_steps", 0) else strategy


def _note(measured: Measured, setting: Setting) -> str:
    """Describe how often means are taken and how long workers wait."""
    if setting.alone:
        return "nothing to wait for"
    forecast, interval = measured.forecast, measured.interval_steps
    parts = [_means(measured, setting)]
    parts.append(f"the link is busy {percent(forecast.busy)} of the time")
    waited = forecast.idle * forecast.step_seconds
    if forecast.idle >= _LEAST_SHOWN:
        per_step = interval in (1, math.inf) or "staleness_max" in measured.details
        wait = show_seconds(waited if per_step else waited * interval)
        parts[-1] += f", workers wait {wait} for each {'step' if per_step else 'mean'}"
    if forecast.apart_steps > FAR_APART:
        parts.append(f"{number(forecast.apart_steps)} steps apart, watch the final metric")
    if not forecast.steady:
        parts.append("not steady when the run was ended")
    return "; ".join(parts)


def _means(measured: Measured, setting: Setting) -> str:
    details, interval, passes = measured.details, measured.interval_steps, measured.pass_steps
    if interval == math.inf:
        return "no mean"
    parts = details.get("parts", 1)
    if "landing_seconds" in details and (parts > 1 or "outer_gain" in details):
        count = f"{parts} part{'s' * (parts > 1)}"
        return f"{count} in {measured.forecast.wire}, the whole model {every(passes)}"
    if "landing_seconds" in details:
        landing = number(details["landing_seconds"] / setting.step_seconds)
        return f"a mean {every(interval)}, in flight for {landing}"
    if passes < math.inf and passes > 1.5 * interval:
        return f"a part of the model {every(interval)}, the whole of it {every(passes)}"
    return f"a mean {every(interval)}"


def every(steps: float) -> str:
    """Return text: "in each step" for 1, "every 8 steps" for 8."""
    shown = number(steps)
    return "in each step" if shown == "1" else f"every {shown} steps"


def number(value: float) -> str:
    """Return ``value`` as text: with three significant digits up to 999, else as an integer."""
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"


def percent(share: float) -> str:
    """Return a share as text in percent: "4.9 %" for 0.049, "23 %" for 0.23."""
    value = 100 * share
    return f"{value:.1f} %" if 0.05 <= value < 9.95 else f"{value:.0f} %"
