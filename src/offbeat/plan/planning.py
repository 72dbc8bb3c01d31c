"""The function ``offbeat.plan`` and the check of its arguments."""

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
from offbeat.registry import parse_strategy
from offbeat.simulate import Network
from offbeat.strategies import BSP, SelSync, Strategy
from offbeat.strategies.base import CustomFlow
from offbeat.training.compatibility import require_abilities
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
    lssr: float = 0.9,
    strategies: Sequence[str | Strategy] | None = None,
    workers_per_node: int = 1,
    inside: float | str | None = None,
    inside_latency: float | str | None = None,
) -> Plan:
    """Predict the time of a step under each strategy.

    The strategies' own code runs in virtual time, as in ``offbeat.simulate``, on a model of a few
    thousand numbers, each of which stands for many. Nothing is trained. The figures describe the
    steady state, without warm-up. A run takes at most five processor seconds; a row that was not
    steady by then says so (``Forecast.steady``).

    *Not modelled*: the final metric; the arithmetic of sums and codecs; integer buffers, if only
    the number of parameters is given; workers that are always slower than others; and other traffic
    on the network. Backward takes twice as long as forward and completes the gradients evenly.
    Jitter is log-normal and independent between steps and workers.

    **Default strategies**: ``bsp``; ``local`` with period 8, and with the smallest period whose
    idle share is at most 5 %; ``selsync:target_lssr=…``; ``streaming``, with a larger staleness if
    workers wait at the default one; ``async`` with the smallest even staleness that hides the merge
    (with jitter: idle ≤ 5 %); eager ``async`` with a staleness that it does not reach.

    **Recommendation**:

    1. BSP, if its idle share is at most 10 %. Averaging models may need about as many more steps
       (``LOST_STEPS``). The cost is called negligible up to 2 %.
    2. StreamingAveraging, if it reaches 95 % of the best throughput.
    3. The LocalSGD with the shortest period of at most 8 whose idle share is at most 5 %.
    4. Of all that reach 95 % of the best throughput, the one with the fewest steps between means.
       Ties are broken by the order of ``offbeat strategies``, custom strategies last; between two
       AsyncAveraging the cyclic one is preferred.

    **Nodes** of L workers are trained as by ``attach(..., node_group=…)``. A single node is run
    first: its step ends when its slowest worker has computed and the mean of its gradients has
    arrived. "Idle" then means waiting for other nodes, as in ``Stats``; the speed-up includes both.

    **SelSync** is assumed to find significant gradients in every 1/(1 − ``lssr``)-th step. Its row
    shows what this costs. Its benefit is in the metric, not in the time.

    Args:
        parameters: Number of averaged parameters, or text like "25M", taken to be in tensors much
            smaller than a bucket of 8 MiB; or the model itself, with its tensors.
        step_time: Compute time t of a step without communication: seconds, or text like "50ms".
        workers: Number of workers N (≥ 1).
        bandwidth: Bandwidth of each worker's link in each direction: bits per second, or text like
            "1Gbit/s".
        latency: Latency α of a message: seconds, or text like "100us" (≥ 0).
        jitter: Standard deviation of the compute time relative to t, in [0, 1].
        wire: Precision of models and gradients, as in ``attach``; None is each strategy's default.
        lssr: Share of local steps of SelSync, in (0, 1). Also assumed for a SelSync with ``delta``.
        strategies: Strategies to forecast in place of the default ones, as text or objects,
            including custom ones but no baselines.
        workers_per_node: L (≥ 1), a divisor of ``workers``. With L > 1, ``bandwidth`` and
            ``latency`` describe the link of a node, shared by its workers.
        inside: Bandwidth of each worker's link inside its node in each direction; None is
            "100Gbit/s".
        inside_latency: Latency inside a node; None is "10us".

    Raises:
        AttachError: A strategy cannot train in nodes.
        TypeError: An argument has the wrong type.
        ValueError: A value is impossible, a strategy is a baseline, or a strategy cannot use
            ``wire``. The message shows the right form.
    """
    setting, given = check_arguments(
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
    setting = with_node_cost(setting)
    if given is None:
        candidates = list(suggestions(wire, setting))
    else:
        candidates = [_evaluate(text, strategy, wire, setting) for text, strategy in given]
    first = next((one for one in candidates if isinstance(one.strategy, BSP)), None)
    bsp = first or evaluate(BSP(), wire, setting)
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
        rows=tuple(one.forecast for one in candidates),
        recommendation=recommendation,
        reason=reason,
    )


def _evaluate(text: str, strategy: Strategy, wire: Precision | None, setting: Setting) -> Measured:
    """Return the forecast of ``strategy``. SelSync with a threshold gets the assumed share."""
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
    lssr: float = 0.9,
    strategies: Sequence[str | Strategy] | None = None,
    workers_per_node: int = 1,
    inside: float | str | None = None,
    inside_latency: float | str | None = None,
) -> tuple[Setting, list[tuple[str, Strategy]] | None]:
    """Check the arguments of ``plan``, which are documented there, without running anything.

    Returns:
        Model and cluster, without the cost of nodes; and the given strategies, each with its text
        form, or None if there are none.
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
    setting = Setting(shapes_of(parameters), workers, network, seconds, jitter, lssr)
    if strategies is None:
        return setting, None
    if isinstance(strategies, str) or not strategies:
        raise ValueError(f'strategies must be a list like ["bsp", "local:period=8"]: {strategies}')
    return setting, [_read(one, wire, workers_per_node > 1) for one in strategies]


def _read(given: str | Strategy, wire: Precision | None, nodes: bool) -> tuple[str, Strategy]:
    """Return the text form and the strategy, or raise if ``plan`` cannot forecast it."""
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
