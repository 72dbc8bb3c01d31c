"""The function ``offbeat.plan``."""

import math
from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from offbeat.plan.play import Setting, in_nodes
from offbeat.plan.question import Question
from offbeat.plan.recommend import recommend
from offbeat.plan.result import Plan
from offbeat.plan.suggest import Candidate, evaluate, suggestions
from offbeat.quantization.wire import Precision
from offbeat.strategies import BSP, SelSync, Strategy


def plan(
    *,
    parameters: float | str | nn.Module,
    step_time: float | str,
    workers: int,
    bandwidth: float | str,
    latency: float | str = "100us",
    jitter: float = 0.0,
    wire: Precision | None = None,
    lssr: float = 0.9,
    strategies: Sequence[str | Strategy] | None = None,
    workers_per_node: int = 1,
    inside: float | str | None = None,
    inside_latency: float | str | None = None,
) -> Plan:
    """Predict the time of a step under each strategy.

    The strategies' own code runs in virtual time, as in ``offbeat.simulate``, on a model of a few
    thousand numbers, each of which stands for many. Nothing is trained. Figures are those of the
    steady state, without warm-up. A run takes at most five seconds of processor; a row that was not
    steady by then says so (``Forecast.steady``).

    *What it leaves out*: the final metric, the arithmetic of sums and codecs, and integer buffers
    of a model of which only the number of parameters is known. Backward is taken to be twice as
    long as forward and to complete the model evenly. Jitter is log-normal and independent from step
    to step and worker to worker; a worker that is always slower than the others is not modelled,
    nor is a network shared with others.

    **Strategies**, unless given: ``bsp``; ``local`` with period 8, and with the smallest period
    whose idle share is at most 5 %; ``selsync:target_lssr=…``; ``streaming``, with a larger
    staleness if it would wait at the default one; ``async`` with the smallest even staleness that
    hides the merge (with jitter, idle ≤ 5 %); ``async`` eager, whose staleness is a bound that it
    does not reach.

    **Recommendation**:

    1. BSP, if its idle share is at most 10 %: what averages models has needed about so many more
       steps where it was measured (``LOST_STEPS``). At most 2 % is next to nothing.
    2. StreamingAveraging, if it is given and reaches 95 % of the best throughput.
    3. The LocalSGD with the shortest period of at most 8 whose idle share is at most 5 %.
    4. Of all that reach 95 % of the best throughput, the one with the fewest steps apart; of equal
       ones, the first in the order of ``offbeat strategies``, custom ones last; of equal ones of
       AsyncAveraging the cyclic.

    **Nodes** of L workers, as ``attach(..., node_group=…)`` trains them. A node by itself is run
    first: its step ends when the slowest of its workers has computed and the mean of their
    gradients is there. "Idle" is waiting for other nodes, as in ``Stats``; the speed-up knows both.

    SelSync takes significant gradients to come at every 1/(1 − ``lssr``)-th step. So its row tells
    what it costs; what it gains is in the metric, not in the time.

    Args:
        parameters: How many numbers are averaged, or text like "25M", in tensors that are small
            against a bucket of 8 MiB. Or the model, whose tensors are taken as they are.
        step_time: t, a step computed alone: seconds, or text like "50ms".
        workers: N (≥ 1).
        bandwidth: Of each worker's link in each direction: bits a second, or "1Gbit/s".
        latency: α, of one message: seconds, or text like "100us" (≥ 0).
        jitter: Standard deviation of a step, relative to t, in [0, 1].
        wire: How models and gradients travel, as in ``attach``; None is that of each strategy.
        lssr: Share of local steps in (0, 1) that SelSync is asked for, and taken to have with a
            ``delta``.
        strategies: Forecast these instead, as text or objects; your own, too. Not baselines.
        workers_per_node: L (≥ 1), a divisor of ``workers``. Then ``bandwidth`` and ``latency`` are
            those of a node's link, which its workers share.
        inside: Of each worker's link inside its node, in each direction; None is "100Gbit/s".
        inside_latency: α there; None is "10us".

    Raises:
        AttachError: a strategy that cannot train in nodes.
        TypeError: an argument of the wrong type.
        ValueError: an impossible value, a baseline, or a strategy that cannot use the ``wire``; the
            message shows the right form.
    """
    question = Question(
        parameters=parameters,
        step_time=step_time,
        workers=workers,
        bandwidth=bandwidth,
        latency=latency,
        jitter=jitter,
        wire=wire,
        lssr=lssr,
        strategies=strategies,
        workers_per_node=workers_per_node,
        inside=inside,
        inside_latency=inside_latency,
    )
    network, given = question.network, question.given
    setting = in_nodes(question.setting)
    if given is None:
        candidates = list(suggestions(wire, setting))
    else:
        candidates = [_candidate(text, one, wire, setting) for text, one in given]
    first = next((one for strategy, one in candidates if isinstance(strategy, BSP)), None)
    bsp = evaluate(BSP(), wire, setting) if first is None else first
    chosen, reason = recommend(candidates, bsp.forecast, setting)
    return Plan(
        parameters=setting.shapes.count,
        step_seconds=setting.step_seconds,
        workers=workers,
        bandwidth=network.bandwidth,
        latency_seconds=network.latency,
        workers_per_node=workers_per_node,
        inside=network.inside,
        inside_latency_seconds=network.inside_latency,
        node_step_seconds=setting.computing,
        jitter=jitter,
        wire=wire or "float32",
        model_bytes=setting.shapes.model_bytes,
        rows=tuple(one.forecast for _, one in candidates),
        recommendation=chosen,
        reason=reason,
    )


def _candidate(
    text: str, strategy: Strategy, wire: Precision | None, setting: Setting
) -> Candidate:
    """``strategy`` and its forecast; SelSync with a threshold has the share of the setting."""
    runs = strategy
    if isinstance(strategy, SelSync) and strategy.target_lssr is not None:
        setting = replace(setting, lssr=strategy.target_lssr)
    elif isinstance(strategy, SelSync) and strategy.delta not in (0, math.inf):
        runs = replace(strategy, delta=None, target_lssr=setting.lssr)
    return strategy, evaluate(runs, wire, setting, text)
