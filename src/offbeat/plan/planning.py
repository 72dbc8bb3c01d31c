"""The function ``offbeat.plan``, and the checks of its arguments."""

import math
from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from offbeat.arguments import require_integer, require_number
from offbeat.plan.forecast import Measured
from offbeat.plan.placeholder_model import shapes_of
from offbeat.plan.recommend import recommend
from offbeat.plan.result import Plan
from offbeat.plan.run import Setting, with_node_cost
from offbeat.plan.suggest import evaluate, suggestions
from offbeat.quantization.wire import Precision, require_precision
from offbeat.simulate import Network
from offbeat.strategies import BSP, SelSync, Strategy
from offbeat.strategies.base import CustomFlow
from offbeat.strategies.registry import parse_strategy
from offbeat.training.checks.compatibility import require_abilities
from offbeat.units import to_seconds


def plan(
    *,
    parameters: float | str | nn.Module,
    step_time: float | str,
    workers: int,
    bandwidth: float | str,
    latency: float | str = "100us",
    jitter: float = 0.0,
    wire: Precision | None = None,
    strategies: Sequence[str | Strategy] | None = None,
    workers_per_node: int = 1,
    inside: float | str | None = None,
    inside_latency: float | str | None = None,
) -> Plan:
    """Predict the time of a step under each strategy, and recommend a strategy.

    The code of each strategy runs in a simulation, as in ``offbeat.simulate``, on a small
    placeholder for the model. Nothing is trained. The figures describe the steady state, without
    warm-up. One simulation takes at most about five processor seconds. If it is not steady by then,
    ``Forecast.steady`` is False.

    *Not modelled*: the final metric; the arithmetic of sums and codecs; integer buffers, if only
    the number of parameters is given; workers that are always slower than others; and other traffic
    on the network. Backward takes twice as long as forward, and completes gradients at a constant
    rate. Jitter is log-normal and independent between steps and workers.

    The *idle share* is the share of the time that a worker waits for others. *Throughput* counts
    samples per second. *Staleness* is the age of the newest mean in a worker's model: the number of
    steps since its computation started.

    **Default strategies**:

    * ``bsp``
    * ``local`` with period 8, and with the smallest period found with an idle share of at most 5 %
    * ``selsync:target_lssr=0.9``
    * ``streaming``, with a larger staleness than its default if its idle share would exceed 5 %
    * ``async`` with the smallest even staleness found at which workers do not wait. With jitter,
      larger values are tried until the idle share is at most 5 %
    * ``async:schedule=eager`` with a staleness bound that it does not reach

    **Recommendation**: the first rule that some strategy satisfies decides.

    1. BSP, if its idle share is at most 10 %. The reason is that averaging models instead of
       gradients may need 10 % more steps.
    2. StreamingAveraging, if it reaches 95 % of the best throughput.
    3. The LocalSGD with the shortest period, among those with a period of at most 8 and an idle
       share of at most 5 %.
    4. The strategy with the fewest steps between means (``Forecast.apart_steps``), among those that
       reach 95 % of the best throughput. If several are equal: the first in the list that
       ``offbeat strategies`` prints. Custom strategies come last, and eager ``async`` after cyclic.

    **Nodes** of several workers train as with ``attach(..., node_group=…)``. A single node is
    simulated first. Its step ends when its slowest worker has computed its gradients and their mean
    over the node has arrived. The idle share then counts only the waiting for other nodes, as in
    ``Stats``. The throughput accounts for all waiting.

    **SelSync** synchronizes in the steps whose gradient changes significantly. The plan assumes
    that these are a tenth of the steps, or a share 1 − ``target_lssr``. It shows the cost of these
    synchronizations but not their benefit, which lies in the final metric.

    Args:
        parameters: The model; or the number of its averaged parameters, like 25e6 or "25M", which
            stands for a model of equal tensors of at most 8 MiB.
        step_time: Compute time t of a step without communication: seconds, or text like "50ms".
        workers: Number of workers (≥ 1).
        bandwidth: Bandwidth of each worker's link in each direction: bits per second, or text like
            "1Gbit/s".
        latency: Latency of a message: seconds, or text like "100us" (≥ 0).
        jitter: Standard deviation of the compute time relative to t, in [0, 1].
        wire: Precision of models and gradients, as in ``attach``; None means the default of each
            strategy.
        strategies: Strategies to forecast in place of the default ones: text, or ``Strategy``
            objects. Baselines, and custom strategies with a flow of their own, are rejected.
        workers_per_node: Number of workers per node, L (≥ 1), a divisor of ``workers``. With L > 1,
            ``bandwidth`` and ``latency`` describe the link of a node, which its workers share.
        inside: Bandwidth of each worker's link inside its node, in each direction; None means
            "100Gbit/s".
        inside_latency: Latency of a message inside a node; None means "10us".

    Raises:
        AttachError: A strategy cannot train in nodes.
        TypeError: An argument has the wrong type.
        ValueError: A value is out of its range; ``workers_per_node`` does not divide ``workers``;
            ``strategies`` is empty or not a list; or a strategy is rejected or cannot use ``wire``.
    """
    setting, given = check_arguments(**locals())  # the arguments, which have the same names
    setting = with_node_cost(setting)
    if given is None:
        candidates = list(suggestions(wire, setting))
    else:
        candidates = [_evaluate(text, strategy, wire, setting) for text, strategy in given]
    measured_bsp = next((each for each in candidates if isinstance(each.strategy, BSP)), None)
    bsp = measured_bsp or evaluate(BSP(), wire, setting)
    recommendation, reason = recommend(candidates, bsp.forecast, setting)
    network = setting.network
    return Plan(
        parameters=setting.shapes.count,
        step_seconds=setting.step_seconds,
        workers=workers,
        bandwidth=network.bandwidth,
        latency_seconds=network.latency,
        workers_per_node=workers_per_node,
        inside=network.inside,
        inside_latency_seconds=network.inside_latency,
        node_step_seconds=setting.mean_step_seconds,
        jitter=jitter,
        wire=wire or "float32",
        model_bytes=setting.shapes.model_bytes,
        rows=tuple(candidate.forecast for candidate in candidates),
        recommendation=recommendation,
        reason=reason,
    )


def _evaluate(text: str, strategy: Strategy, wire: Precision | None, setting: Setting) -> Measured:
    """Return the forecast of ``strategy``.

    The gradients of the placeholder model mean nothing. So SelSync with a finite threshold
    ``delta`` > 0 is replaced by SelSync with a target for the share of steps without a mean.
    """
    if isinstance(strategy, SelSync) and strategy.target_lssr is not None:
        setting = replace(setting, lssr=strategy.target_lssr)
    elif isinstance(strategy, SelSync) and strategy.delta not in (0, math.inf):
        strategy = replace(strategy, delta=None, target_lssr=setting.lssr)
    return evaluate(strategy, wire, setting, text)


def check_arguments(
    *,
    parameters: float | str | nn.Module,
    step_time: float | str,
    workers: int,
    bandwidth: float | str,
    latency: float | str,
    jitter: float = 0.0,
    wire: Precision | None = None,
    strategies: Sequence[str | Strategy] | None = None,
    workers_per_node: int = 1,
    inside: float | str | None = None,
    inside_latency: float | str | None = None,
) -> tuple[Setting, list[tuple[str, Strategy]] | None]:
    """Check the arguments of ``plan``, which documents them. Simulates nothing.

    Returns:
        The setting, in which averaging inside a node takes no time yet; and the given strategies,
        each after its text form, or None if ``strategies`` is None.
    """
    require_integer("workers", workers, least=1)
    if wire is not None:
        require_precision(wire)
    require_number("jitter", jitter)
    if not 0 <= jitter <= 1:
        raise ValueError(f"jitter must be in [0, 1], like 0.1 for 10 % of a step, got {jitter}")
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
    seconds = to_seconds(step_time)
    setting = Setting(shapes_of(parameters), workers, network, seconds, jitter)
    if strategies is None:
        return setting, None
    if isinstance(strategies, str) or not strategies:
        raise ValueError(f'strategies must be a list like ["bsp", "local:period=8"]: {strategies}')
    return setting, [_read(given, wire, workers_per_node > 1) for given in strategies]


def _read(given: str | Strategy, wire: Precision | None, nodes: bool) -> tuple[str, Strategy]:
    """Return the text form and the strategy. Raise if ``plan`` cannot forecast it."""
    if not isinstance(given, str | Strategy):
        raise TypeError(f"a strategy is text like local:period=8, or a Strategy; got {given!r}")
    strategy = parse_strategy(given) if isinstance(given, str) else given
    if isinstance(strategy.averages(), CustomFlow):
        raise ValueError(
            f"plan has no row for {strategy}: it is a baseline to compare with, or has a "
            "flow of its own; run it with offbeat compare or offbeat simulate"
        )
    require_abilities(strategy, wire=wire or strategy.default_wire, nodes=nodes)
    return str(given).strip(), strategy
