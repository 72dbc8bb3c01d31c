"""Which of the forecasts to try first, and why. The rule stands in ``offbeat.plan``."""

from collections.abc import Sequence

from offbeat.plan.forecast import FAR_APART, Forecast, Measured, every, number, percent
from offbeat.plan.play import Setting
from offbeat.plan.suggest import IDLE_LIMIT, SHORT_PERIOD, Candidate
from offbeat.registry import STRATEGIES
from offbeat.strategies import (
    BSP,
    AsyncAveraging,
    LocalSGD,
    StreamingAveraging,
)

NEXT_TO_NOTHING = 0.02
"""The share of waiting at which exact synchronous training costs almost nothing."""
LOST_STEPS = 0.1
"""The share of steps that averaging models loses against BSP, for the same metric. Measured on one
model and one seed (``benchmarks/results/streaming-links.jsonl``): streaming averaging reached four
accuracies with 0.8 to 1.2 times the steps of the ideal, 1.0 times on average over three links."""

_WATCH = "watch the final metric, or make a step longer with a larger batch"


def recommend(
    candidates: Sequence[Candidate], bsp: Forecast, setting: Setting
) -> tuple[Forecast, str]:
    """The row to try first, and why.

    Args:
        candidates: The strategies with their forecasts.
        bsp: That of BSP, which need not be one of them.
        setting: Model and cluster.
    """
    if bsp.idle <= LOST_STEPS and any(isinstance(one, BSP) for one, _ in candidates):
        return bsp, _why_bsp(bsp, setting)
    would = f"BSP would wait {percent(bsp.idle)} of the time"
    fastest = max(one.forecast.throughput for _, one in candidates)
    fast = [c for c in candidates if c[1].forecast.throughput >= (1 - IDLE_LIMIT) * fastest]
    for strategy, measured in fast:
        if isinstance(strategy, StreamingAveraging):
            return measured.forecast, f"{would}; {_why_streaming(measured)}"
    short = [
        candidate
        for candidate in candidates
        if isinstance(candidate[0], LocalSGD)
        and candidate[1].forecast.apart_steps <= SHORT_PERIOD
        and candidate[1].forecast.idle <= IDLE_LIMIT
    ]
    order = [*STRATEGIES.values()]

    def distance(candidate: Candidate) -> tuple[float, int, bool]:
        strategy, measured = candidate
        kind = type(strategy)
        eager = isinstance(strategy, AsyncAveraging) and strategy.schedule == "eager"
        place = order.index(kind) if kind in order else len(order)
        return measured.forecast.apart_steps, place, eager

    strategy, measured = min(short or fast, key=distance)
    chosen = measured.forecast
    if isinstance(strategy, BSP):
        return chosen, f"{would}, and no other strategy given is faster"
    why = f"{chosen.strategy} waits {percent(chosen.idle)}"
    if isinstance(strategy, AsyncAveraging) and "landing_seconds" in measured.details:
        merge = number(measured.details["landing_seconds"] / setting.step_seconds)
        if percent(chosen.idle) == percent(0.0):
            why = f"so {chosen.strategy} hides it"
        else:
            why = f"and with {chosen.strategy} workers wait {percent(chosen.idle)}"
        why = f"a merge is under way for {merge} steps, {why}"
    if chosen.apart_steps > FAR_APART:
        why += f", but lets the workers go {number(chosen.apart_steps)} steps apart: {_WATCH}"
    return chosen, f"{would}; {why}"


def _why_bsp(bsp: Forecast, setting: Setting) -> str:
    if setting.alone:
        one = "worker" if setting.network.workers_per_node == 1 else "node"
        return f"a single {one} has nobody to wait for"
    waits = f"BSP waits {percent(bsp.idle)} of the time"
    if bsp.idle <= NEXT_TO_NOTHING:
        return f"exact synchronous training costs almost nothing here, {waits}"
    return f"{waits}, no more than averaging models may lose in steps"


def _why_streaming(measured: Measured) -> str:
    """How often the whole model passes, in what, and what is waited for."""
    chosen, passes = measured.forecast, measured.pass_steps
    why = f"{chosen.strategy} sends the model in {chosen.wire} beside computing, "
    why += f"all of it {every(passes)}, and waits {percent(chosen.idle)}"
    return why if passes <= FAR_APART else f"{why}: {_WATCH}"
