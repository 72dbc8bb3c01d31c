"""The choice of the strategy to try first. The function ``offbeat.plan`` documents the rules."""

from collections.abc import Sequence

from offbeat.plan.forecast import FAR_APART, Forecast, Measured, every, number, percent
from offbeat.plan.run import Setting
from offbeat.plan.suggest import IDLE_LIMIT, SHORT_PERIOD
from offbeat.strategies import (
    BSP,
    AsyncAveraging,
    LocalSGD,
    StreamingAveraging,
)
from offbeat.strategies.registry import STRATEGIES

NEGLIGIBLE_IDLE = 0.02
"""Largest idle share at which BSP is said to cost almost nothing. The *idle share* is the share of
the time that a worker waits for others."""
LOST_STEPS = 0.1
"""Share of additional steps that averaging models may need to reach the same metric as BSP. BSP is
therefore recommended up to this idle share. In ``docs/evidence.md``, streaming averaging needs 4 to
9 % more time to 90 % of the possible improvement on links of 50 Mbit/s and more, in virtual time,
and 10 to 25 % more on processes that share cores."""

_WATCH = "watch the final metric, or make a step longer with a larger batch"


def recommend(
    candidates: Sequence[Measured], bsp: Forecast, setting: Setting
) -> tuple[Forecast, str]:
    """Return the forecast of the strategy to try first, and a text that says why.

    ``bsp`` is the forecast of BSP, which need not be a candidate.
    """
    if bsp.idle <= LOST_STEPS and any(isinstance(each.strategy, BSP) for each in candidates):
        return bsp, _why_bsp(bsp, setting)
    premise = f"BSP would wait {percent(bsp.idle)} of the time"
    fastest = max(each.forecast.throughput for each in candidates)
    fast = [each for each in candidates if each.forecast.throughput >= (1 - IDLE_LIMIT) * fastest]
    for measured in fast:
        if isinstance(measured.strategy, StreamingAveraging):
            return measured.forecast, f"{premise}; {_why_streaming(measured)}"
    short = [
        each
        for each in candidates
        if isinstance(each.strategy, LocalSGD)
        and each.forecast.apart_steps <= SHORT_PERIOD
        and each.forecast.idle <= IDLE_LIMIT
    ]
    measured = min(short or fast, key=_preference)
    chosen = measured.forecast
    if isinstance(measured.strategy, BSP):
        return chosen, f"{premise}, and no other strategy given is faster"
    return chosen, f"{premise}; {_why(measured, setting)}"


def _preference(measured: Measured) -> tuple[float, int, bool]:
    """Return the sort key of rules 3 and 4 of ``offbeat.plan``: the smallest key is preferred."""
    strategy, order = measured.strategy, [*STRATEGIES.values()]
    kind = type(strategy)
    eager = isinstance(strategy, AsyncAveraging) and strategy.schedule == "eager"
    position = order.index(kind) if kind in order else len(order)
    return measured.forecast.apart_steps, position, eager


def _why(measured: Measured, setting: Setting) -> str:
    chosen = measured.forecast
    idle = percent(chosen.idle)
    why = f"{chosen.strategy} waits {idle}"
    if isinstance(measured.strategy, AsyncAveraging) and "landing_seconds" in measured.details:
        steps = number(measured.details["landing_seconds"] / setting.step_seconds)
        if idle == percent(0.0):
            why = f"{chosen.strategy} does not wait for it"
        why = f"a mean is in flight for {steps} steps, and {why}"
    if chosen.apart_steps > FAR_APART:
        why += f", but lets the workers go {number(chosen.apart_steps)} steps apart: {_WATCH}"
    return why


def _why_bsp(bsp: Forecast, setting: Setting) -> str:
    if setting.alone:
        unit = "worker" if setting.network.workers_per_node == 1 else "node"
        return f"a single {unit} waits for no other"
    waits = f"BSP waits {percent(bsp.idle)} of the time"
    if bsp.idle <= NEGLIGIBLE_IDLE:
        return f"exact synchronous training costs almost nothing here, {waits}"
    return f"{waits}, no more than averaging models may lose in steps"


def _why_streaming(measured: Measured) -> str:
    chosen, passes = measured.forecast, measured.pass_steps
    why = f"{chosen.strategy} sends the model in {chosen.wire} while computing, "
    why += f"all of it {every(passes)}, and waits {percent(chosen.idle)}"
    return why if passes <= FAR_APART else f"{why}: {_WATCH}"
