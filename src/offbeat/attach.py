"""``attach`` puts a synchronization strategy on an ordinary training loop."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial, wraps
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import LBFGS, Optimizer

from offbeat.arguments import require_integer
from offbeat.averaging import AttachedOptimizer, NonFinite
from offbeat.elastic.connect import open_communicator
from offbeat.errors import AttachError
from offbeat.nodes.detection import NodeGroup, open_nodes
from offbeat.nodes.shards import shards_of
from offbeat.quantization.kernels import kernels
from offbeat.quantization.wire import Precision
from offbeat.strategies.base import SharedModel, Strategy
from offbeat.strategies.streaming import StreamingAveraging
from offbeat.synchronizer import Synchronizer, attached
from offbeat.training.compatibility import (
    require_abilities,
    require_distinct_memory,
    require_timeout,
    require_usable,
)
from offbeat.training.ddp import AroundDDP, require_no_engine, unwrapped
from offbeat.training.optimizers import require_own_state, unwrapped_optimizer
from offbeat.transport.communicator import Transport
from offbeat.transport.team import Team

T = TypeVar("T")
_REPLACED = {
    "optimizer_state": 'give it to the strategy: LocalSGD(period=8, optimizer_state="average")',
    "distance_every": "call sync.monitor(distance_every=…) after attach()",
    "gradient_change": "call sync.monitor(gradient_change=True) after attach()",
    "max_grad_norm": "call sync.clip_grad_norm_(…) before the step, or torch's function",
    "companions": "call sync.follow(…) after attach()",
    "on_failure": "give min_workers=1 to continue after the loss of workers",
}


def _names_replacements(function: Callable[..., T]) -> Callable[..., T]:
    """Let an argument of an earlier version raise a TypeError that names its replacement."""

    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> T:
        for name in kwargs:
            if name in _REPLACED:
                raise TypeError(f"attach() no longer takes {name}: {_REPLACED[name]}")
        if kwargs.get("non_finite") == "leave_out":
            raise ValueError('non_finite="leave_out" is now called non_finite="exclude"')
        return function(*args, **kwargs)

    return checked


@_names_replacements
def attach(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    strategy: Strategy | None = None,
    *,
    group: dist.ProcessGroup | Transport | None = None,
    node_group: NodeGroup | None = None,
    scaler: torch.amp.GradScaler | None = None,
    wire: Precision | None = None,
    non_finite: NonFinite = "raise",
    min_workers: int | None = None,
    log: object = None,
    timeout_seconds: float = 300.0,
) -> Synchronizer:
    """Train ``model`` data-parallel under ``strategy``; the training loop is unchanged.

    A collective: every worker calls it. It compares model, optimizers and strategy between the
    workers, warns where settings of the optimizers, the model's mode or versions differ, copies
    rank 0's parameters and buffers to all, and hooks ``optimizer.step``. From then on one iteration
    is one step of every optimizer, whatever happens before it (gradient accumulation, several
    backward passes).

    Args:
        model: The model. Parameters that have ``requires_grad`` now are averaged. To unfreeze
            others later, ``detach`` and attach again.
        optimizer: The optimizer that moves them, or a list of optimizers. Wrappers of Accelerate,
            Lightning, Fabric and Opacus are unwrapped.
        strategy: When to synchronize, for example ``offbeat.SelSync()``. None:
            ``offbeat.StreamingAveraging()``.
        group: The process group of the workers. None: the default group. Or a transport of your
            own, which makes a communicator: see ``offbeat.transport.communicator.Transport``.
        node_group: The process group of this worker's node, whose workers are connected by a fast
            network. They average their gradients and buffers in every step, and the strategy works
            between the nodes, each of which counts as one worker. "auto": the nodes of torchrun.
            ``group`` holds the workers of all nodes. Every node has equally many workers, which
            take equally many steps; each carries an equal part of the node's messages. The model
            may be divided by ``fully_shard`` over a mesh of the node's workers: each of them then
            trains its shards with its counterparts in the other nodes. None: no nodes.
        scaler: The GradScaler in use, if any. Iterations then count even where it skips a step.
        wire: Precision of the means of parameters and gradients: "float32", "bfloat16", "int8",
            "int4" or "int2". "auto": chosen during training by the time that workers wait. None:
            "int2" for ``StreamingAveraging``, "float32" for all others. The quantization error is
            fed back into the next message (error feedback), which takes a model copy of memory,
            except with ``StreamingAveraging``. Buffers are always sent exactly.
        non_finite: Policy for a worker that is about to contribute NaN or infinity to a mean.
            "raise" raises on all workers before any other model has received it. "warn" logs it
            once. "exclude" gives the worker weight 0 in this round: it continues from the mean of
            the others or from the shared model, and ``Stats.details`` counts
            ``non_finite_excluded``. The check reads once what is about to be sent. A value that
            becomes infinite after it, in the step itself, is found one round later. Gradients are
            not checked under a ``scaler``.
        min_workers: Makes training elastic: it continues after the loss of workers while at least
            so many (≥ 1) are left, and admits workers that join; see docs/elastic.md. None: the
            loss of a worker raises ``CommunicationError`` on all others.
        log: Where a record of every step goes: a path (JSON lines; ``.rankN`` is added before the
            suffix unless the path contains ``{rank}``), a sink, or a list of them.
        timeout_seconds: Largest duration of an operation between workers, after which it raises
            ``CommunicationTimeout`` on every worker; at most a year. Choose it larger than the
            longest time by which a worker may lag behind between two synchronizations.

    Returns:
        The synchronizer. It is also a context manager, which finishes on a clean exit and detaches
        when an exception leaves the block.

    Raises:
        AttachError: no process group; a model or optimizer that is attached already; LBFGS; an
            optimizer without parameters of this model, or with others; an optimizer whose step
            hooks do not work, or that communicates; a DistributedDataParallel that cannot be
            switched off, or a DeepSpeed engine; a parameter or buffer that cannot be written in
            place (lazy, on the meta device, expanded, sparse, sharded without ``node_group``);
            options that exclude each other, or that a baseline does not support.
        MismatchError: another worker has another model, optimizer or strategy.
        CommunicationError: a worker did not take part.
        TypeError, ValueError: an argument of a wrong type or value.
    """
    if strategy is None:
        strategy = StreamingAveraging()
    if not isinstance(strategy, Strategy):
        raise TypeError(
            f"strategy must be a strategy such as offbeat.SelSync(), got {strategy!r}; "
            "offbeat.parse_strategy reads the text form"
        )
    wire = strategy.default_wire if wire is None else wire
    require_timeout(timeout_seconds)
    if min_workers is not None:
        require_integer("min_workers", min_workers, least=1)
    elastic = min_workers is not None
    model = unwrapped(model)
    optimizers = _optimizers(optimizer)
    shards = shards_of(model, group, node_group)
    require_abilities(
        strategy,
        wire=wire,
        non_finite=non_finite,
        nodes=node_group is not None,
        sharded=shards is not None,
        elastic=elastic,
        optimizers=len(optimizers),
    )
    held = model if shards is None else shards
    require_usable(held)
    require_no_engine(model)
    require_distinct_memory(dict(held.named_parameters()), strategy)
    averages = strategy.averages()
    if isinstance(averages, SharedModel) and averages.optimizer_state:
        require_own_state(optimizers)
    attached_optimizers = _attached(model, optimizers)
    if shards is not None:
        attached_optimizers = [
            replace(one, parameters=[*map(shards.shard, one.parameters)])
            for one in attached_optimizers
        ]
    if wire != "float32":
        kernels()  # compiled before any other worker waits for this one
    around = AroundDDP(model, group, strategy, wire)
    try:
        team = _team(
            group, node_group, timeout_seconds, elastic=elastic, sharded=shards is not None
        )
    except BaseException:
        around.remove()
        raise
    try:
        if not elastic and team.view:
            raise AttachError("a worker that joins needs min_workers, as the others have")
        if min_workers is not None and team.size < min_workers:
            raise AttachError(f"min_workers={min_workers}, but there are {team.size} workers")
        sync = Synchronizer(
            model,
            attached_optimizers,
            strategy,
            team,
            scaler=scaler,
            wire=wire,
            log=log,
            non_finite=non_finite,
            min_workers=min_workers,
            hooks=[around],
            shards=shards,
            connect=partial(open_communicator, group, timeout_seconds, what="monitor()"),
        )
    except BaseException:
        around.remove()
        if elastic and team.membership is not None:
            team.membership.leave(ended=False)
        team.close()
        raise
    around.steps = lambda: sync.step
    return sync


def _team(
    group: dist.ProcessGroup | Transport | None,
    node_group: NodeGroup | None,
    timeout_seconds: float,
    *,
    elastic: bool,
    sharded: bool,
) -> Team:
    if node_group is not None:
        communicator, node = open_nodes(group, node_group, timeout_seconds, sharded=sharded)
        return Team(communicator, node=node)
    return Team(open_communicator(group, timeout_seconds, what="offbeat.attach()", elastic=elastic))


def _optimizers(given: Optimizer | Sequence[Optimizer]) -> list[Optimizer]:
    if isinstance(given, Iterable) and not isinstance(given, Optimizer):
        return [unwrapped_optimizer(one) for one in given]
    return [unwrapped_optimizer(given)]


def _attached(model: nn.Module, optimizers: Sequence[Optimizer]) -> list[AttachedOptimizer]:
    """Each optimizer with the parameters of the model that it moves, in the model's order."""
    if not optimizers:
        raise AttachError("attach() needs at least one optimizer")
    named = {id(p): name for name, p in model.named_parameters()}
    found: list[AttachedOptimizer] = []
    owner: dict[int, Optimizer] = {}
    for one in optimizers:
        if isinstance(one, LBFGS):
            raise AttachError(
                "LBFGS takes many steps inside one step() and cannot be synchronized; use a "
                "first-order optimizer such as SGD or AdamW"
            )
        held = {id(p) for group in one.param_groups for p in group["params"]}
        if not held & named.keys():
            raise AttachError(
                f"the {type(one).__name__} holds no parameter of this model: build it from "
                "model.parameters() of the model given to attach()"
            )
        if held - named.keys():
            raise AttachError(
                f"the {type(one).__name__} also moves {len(held - named.keys())} tensor(s) that "
                "are not parameters of this model; put them into one nn.Module with the model, or "
                "give them an optimizer of their own"
            )
        for key in held:
            if key in owner:
                raise AttachError(f"two optimizers both move parameter {named[key]!r}")
            owner[key] = one
        moved = [p for p in model.parameters() if id(p) in held and p.requires_grad]
        if not moved:
            raise AttachError(
                f"all parameters of the {type(one).__name__} are frozen: set requires_grad before "
                "attach()"
            )
        found.append(AttachedOptimizer(len(found), one, moved))
    for thing in (model, *optimizers):
        if thing in attached:
            raise AttachError(
                f"this {type(thing).__name__} is attached already: finish() or detach() the first "
                "synchronizer before attaching another"
            )
    return found
