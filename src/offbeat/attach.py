"""``attach`` connects the training loop of this worker with the other workers."""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import LBFGS, Optimizer

from offbeat.arguments import require_integer
from offbeat.averaging import AttachedOptimizer, NonFinite
from offbeat.elastic import reports
from offbeat.elastic.gathering import gathering_from_environment
from offbeat.errors import AttachError
from offbeat.nodes.detection import NodeGroup, open_nodes
from offbeat.nodes.shards import shards_of
from offbeat.quantization.kernels import kernels
from offbeat.quantization.wire import Precision
from offbeat.strategies.base import CustomFlow, GlobalModel, Gradients, Strategy
from offbeat.strategies.streaming import StreamingAveraging
from offbeat.synchronizer import Synchronizer
from offbeat.training.assembly import Components
from offbeat.training.checks.compatibility import (
    require_abilities,
    require_distinct_memory,
    require_synchronous_layers,
    require_timeout,
    require_usable,
)
from offbeat.training.ddp import suppress_ddp, unwrapped
from offbeat.training.hooks import attached
from offbeat.training.learning_rate.adam_correction import can_correct, require_correctable
from offbeat.training.optimizers import unwrapped_optimizer
from offbeat.transport.communicator import Transport
from offbeat.transport.connect import open_communicator
from offbeat.transport.team import Team


def attach(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    strategy: Strategy | None = None,
    *,
    group: dist.ProcessGroup | Transport | None = None,
    node_group: NodeGroup | None = None,
    scaler: torch.amp.GradScaler | None = None,
    wire: Precision | None = None,
    adam_correction: bool | None = None,
    non_finite: NonFinite = "raise",
    min_workers: int | None = None,
    log: object = None,
    timeout_seconds: float = 300.0,
) -> Synchronizer:
    """Synchronize the training of ``model`` between the workers, as ``strategy`` decides.

    The training loop does not change: each worker trains on its own batches and calls
    ``optimizer.step()``. ``attach`` is a collective. It

    1. checks that all workers have the same model, optimizers and strategy,
    2. copies rank 0's parameters and buffers to all workers,
    3. hooks ``optimizer.step``, so that the strategy runs in every step,
    4. hooks the parameters, if gradients are averaged or measured. The hooks run at the end of
       ``backward()``, as in DDP, so that clipping and the optimizers see the mean gradient.

    The strategy counts iterations. One iteration is one step of every optimizer, regardless of the
    number of backward passes before it; see ``Synchronizer.no_sync`` for gradient accumulation.

    Args:
        model: The model; several networks in an ``nn.ModuleList``. The strategy averages the
            parameters that have ``requires_grad`` now, or their gradients. To unfreeze further
            parameters later, call ``detach`` and attach again. If DistributedDataParallel wraps
            the model, pass the wrapper. ``attach`` switches off its communication, including that
            of ``join()``, until ``finish`` or ``detach``.
        optimizer: The optimizer of the model, or a list of optimizers.
        strategy: The algorithm that decides what the workers average and when, for example
            ``offbeat.SelSync()``. None: ``offbeat.StreamingAveraging()``.
        group: Process group of the workers, or a custom transport
            (``offbeat.transport.communicator.Transport``). None: the default group. But if the
            environment variable ``OFFBEAT_STORE`` names a store (a server or a file), the workers
            that gather there; see docs/failures.md. A script without a process group, and without
            ``WORLD_SIZE`` > 1 in its environment, trains as a single worker.
        node_group: Process group of this worker's node: workers that are connected by a fast
            network, for example the GPUs of one machine. "auto": the workers that one torchrun
            command started on this machine. None: every worker is a node by itself.

            - The workers of a node average their gradients and buffers in every step. The strategy
              averages between the nodes, and counts each node as one worker. Each worker of a
              node sends one share of the model to the other nodes.
            - All nodes must have equally many workers. The workers of one node must take equally
              many steps.
            - ``fully_shard`` may divide the model over a device mesh of the node's workers.
        scaler: The GradScaler in use. None: no scaler. A step that it skips counts as an iteration.
        wire: Precision at which parameters and gradients are sent: "float32", "int8", "int4"
            or "int2". None: the strategy's ``default_wire``, which is "int2" for
            ``StreamingAveraging`` with its default schedule, and "float32" for the other strategies
            of Offbeat. The quantization error of a message is added to the next message (error
            feedback). Storing the errors takes one or two copies of the model, and none with
            ``StreamingAveraging``. Buffers are not quantized.
        adam_correction: True to lengthen the local steps of Adam, AdamW and NAdam by a measured
            factor from 1 to √N, where N is the number of workers. Adam divides a step by the root
            mean square of the gradients. Local gradients are noisier than the mean gradient, so the
            mean of the local steps is too short; see docs/strategies.md. None: True if the strategy
            averages models and all optimizers are of these types.
        non_finite: Handling of a worker that is about to contribute NaN or infinity to a mean.

            - "raise": all workers raise ``OffbeatError``, before another model has received it.
            - "warn": the workers log one warning, and the value enters the mean.

            The check costs one pass over the contribution. In buffers only NaN counts. With a
            ``scaler`` the gradients are not checked, because the scaler skips steps with non-finite
            gradients.
        min_workers: Smallest number of workers (≥ 1) with which elastic training continues.
            Training is elastic with ``OFFBEAT_STORE``, as under ``offbeat run``: it continues after
            the loss of workers, and workers can join and receive the model of another worker; see
            docs/failures.md. None: the first number of ``OFFBEAT_WORKERS="2:4"``, or 1. Refused
            with a process group: all its workers raise ``CommunicationError`` if one is lost.
        log: Destination of the telemetry records, one for each step: the path of a file of JSON
            lines, a sink (an object with ``write(record)`` and ``close()``), or a list of these.
            Each worker writes a separate file: the rank replaces ``{rank}`` in the path, or
            ``.rankN`` is inserted before its suffix. None: no records.
        timeout_seconds: Time limit of each operation between workers, from a millisecond to a year.
            An operation that takes longer raises ``CommunicationTimeout``. Operations wait for the
            slowest worker, so the limit must exceed the time by which a worker may lag behind.

    Returns:
        The synchronizer. It is also a context manager: a clean exit calls ``finish``, an exception
        calls ``detach``.

    Raises:
        AttachError: for example, ``WORLD_SIZE`` > 1 without a process group, the model is attached
            already, two options exclude each other, or the strategy does not support an option.
        MismatchError: the workers differ in the model, the optimizers, the strategy, ``wire``,
            ``adam_correction``, ``non_finite`` or ``min_workers``.
        CommunicationError: another worker failed, or did not call ``attach`` in time.
        EndedError: the workers at ``OFFBEAT_STORE`` have finished the training.
        TypeError, ValueError: an argument has a wrong type or value.
    """
    if strategy is None:
        strategy = StreamingAveraging()
    if not isinstance(strategy, Strategy):
        raise TypeError(
            f"strategy must be a strategy such as offbeat.SelSync(), got {strategy!r}; "
            "offbeat.parse_strategy reads the text form"
        )
    # -- checks that send nothing --
    wire = strategy.default_wire if wire is None else wire
    require_timeout(timeout_seconds)
    gathering = gathering_from_environment() if group is None else None
    if gathering is not None and min_workers is None:
        min_workers = gathering.workers.min_workers
    if min_workers is not None:
        require_integer("min_workers", min_workers, least=1)
    elastic = min_workers is not None
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model must be an nn.Module, got a {type(model).__name__}: give several networks as "
            "nn.ModuleList([generator, discriminator])"
        )
    if not isinstance(scaler, torch.amp.GradScaler | None):
        raise TypeError(
            f"scaler must be a torch.amp.GradScaler, got a {type(scaler).__name__}: give the "
            "GradScaler inside it"
        )
    given, model = model, unwrapped(model)
    optimizers = _optimizers(optimizer)
    shards = shards_of(model, group, node_group)
    require_abilities(
        strategy,
        wire=wire,
        adam_correction=bool(adam_correction),
        non_finite=non_finite,
        nodes=node_group is not None,
        sharded=shards is not None,
        elastic=elastic,
        optimizers=len(optimizers),
    )
    averages = strategy.averages()
    if adam_correction is None:
        models = isinstance(averages, GlobalModel)
        if isinstance(averages, CustomFlow):
            models = averages.models
        adam_correction = models and all(map(can_correct, optimizers))
    if adam_correction:
        require_correctable(optimizers)
        strategy = strategy.with_adam_correction()
    local_model = model if shards is None else shards
    require_usable(local_model)
    require_synchronous_layers(model, strategy, nodes=node_group is not None)
    require_distinct_memory(dict(local_model.named_parameters()), strategy)
    attached_optimizers = _attached_optimizers(model, optimizers)
    if shards is not None:
        attached_optimizers = [
            replace(each, parameters=[*map(shards.shard, each.parameters)])
            for each in attached_optimizers
        ]
    if wire != "float32":
        kernels()  # compile before the first collective, not between two of them
    # -- from here on every worker must take part --
    undo = ExitStack()
    wrappers = suppress_ddp(given, group, node_group, undo)

    def begin() -> Synchronizer:
        with ExitStack() as on_failure:
            if node_group is None:
                where = gathering or group
                what = "offbeat.attach()"
                team = Team(open_communicator(where, timeout_seconds, what=what, elastic=elastic))
            else:
                sharded = shards is not None
                # Nodes are not needed if all workers average their gradients in each step.
                needed = sharded or not isinstance(averages, Gradients)
                team = open_nodes(
                    group, node_group, timeout_seconds, sharded=sharded, needed=needed
                )
            on_failure.callback(team.close)
            if elastic and team.membership is not None:
                on_failure.callback(team.membership.leave, ended=False)
            if not elastic and team.generation:
                raise AttachError("a worker that joins needs min_workers, as the others have")
            if min_workers is not None and team.size < min_workers:
                raise AttachError(f"min_workers={min_workers}, but there are {team.size} workers")
            components = Components(
                model,
                attached_optimizers,
                strategy,
                team,
                scaler=scaler,
                wire=wire,
                adam_correction=adam_correction,
                log=log,
                non_finite=non_finite,
                min_workers=min_workers,
                wrappers=wrappers,
                shards=shards,
                undo=undo,
            )
            on_failure.pop_all()
        if gathering is not None:
            reports.tell(f"trains with identity {team.identity}")
        return Synchronizer(components)

    try:
        return begin() if gathering is None else gathering.retry_after_losses(begin)
    except BaseException:
        undo.close()
        raise


def _optimizers(optimizers: Optimizer | Sequence[Optimizer]) -> list[Optimizer]:
    if isinstance(optimizers, Iterable) and not isinstance(optimizers, Optimizer):
        return [unwrapped_optimizer(each) for each in optimizers]
    return [unwrapped_optimizer(optimizers)]


def _attached_optimizers(
    model: nn.Module, optimizers: Sequence[Optimizer]
) -> list[AttachedOptimizer]:
    """Return each optimizer with its trainable parameters, in the order of ``model.parameters()``.

    Raises AttachError unless the optimizers can be synchronized.
    """
    if not optimizers:
        raise AttachError("attach() needs at least one optimizer")
    named = {id(p): name for name, p in model.named_parameters()}
    result: list[AttachedOptimizer] = []
    seen: set[int] = set()  # parameters of the optimizers so far
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        if isinstance(optimizer, LBFGS):
            raise AttachError(
                "LBFGS takes many steps inside one step() and cannot be synchronized; use a "
                "first-order optimizer such as SGD or AdamW"
            )
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if not own & named.keys():
            raise AttachError(
                f"the {kind} holds no parameter of this model: build it from model.parameters() of "
                "the model given to attach(), which is nn.ModuleList([…]) for several networks"
            )
        if own - named.keys():
            raise AttachError(
                f"the {kind} also moves {len(own - named.keys())} tensor(s) that are not "
                "parameters of this model; put them into one nn.Module with the model, or give "
                "them an optimizer of their own"
            )
        for key in own & seen:
            raise AttachError(f"two optimizers both move parameter {named[key]!r}")
        seen |= own
        trainable = [p for p in model.parameters() if id(p) in own and p.requires_grad]
        if not trainable:
            raise AttachError(
                f"all parameters of the {kind} are frozen: set requires_grad before attach()"
            )
        result.append(AttachedOptimizer(len(result), optimizer, trainable))
    for each in (model, *optimizers):
        if each in attached:
            raise AttachError(
                f"this {type(each).__name__} is attached already: finish() or detach() the first "
                "synchronizer before attaching another"
            )
    return result
