"""The front door: ``attach`` puts a synchronization strategy on an ordinary training loop."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import LBFGS, Optimizer

from offbeat.arguments import POSITIVE, require_choice, require_integer, require_number
from offbeat.errors import AttachError
from offbeat.fabric import NodeGroup, Team, Transport, open_communicator, open_nodes
from offbeat.fabric.wire import Precision
from offbeat.kernels import kernels
from offbeat.strategies.base import NonFinite, Part, Strategy
from offbeat.strategies.streaming import StreamingAveraging
from offbeat.training.beside import require_beside
from offbeat.training.ddp import AroundDDP, require_no_engine, unwrapped
from offbeat.training.optimizers import require_own_state, unwrapped_optimizer
from offbeat.training.requirements import (
    require_continuation,
    require_nodes,
    require_non_finite,
    require_optimizer_state,
    require_timeout,
    require_wire,
)
from offbeat.training.shards import shards_of
from offbeat.training.synchronizer import Synchronizer, attached
from offbeat.training.usable import require_apart, require_usable
from offbeat.training.views import Means


def attach(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    strategy: Strategy | None = None,
    *,
    group: dist.ProcessGroup | Transport | None = None,
    node_group: NodeGroup | None = None,
    scaler: torch.amp.GradScaler | None = None,
    optimizer_state: Literal["local", "average"] = "local",
    wire: Precision | None = None,
    log: object = None,
    distance_every: int | None = None,
    gradient_change: bool = False,
    non_finite: NonFinite = "warn",
    max_grad_norm: float | None = None,
    companions: Sequence[nn.Module] = (),
    on_failure: Literal["raise", "continue"] = "raise",
    min_workers: int = 1,
    timeout_seconds: float = 300.0,
) -> Synchronizer:
    """Train ``model`` data-parallel under ``strategy``; the training loop stays as it is.

    A collective: every worker calls it. It compares model, optimizers and strategy between the
    workers, warns where settings of the optimizers, the model's mode or versions differ, copies
    rank 0's parameters and buffers to all, and hooks ``optimizer.step``. From then on one iteration
    is one step of every optimizer, whatever happens before it (gradient accumulation, several
    backward passes).

    Args:
        model: The model. Of its parameters those that have ``requires_grad`` now are averaged. To
            unfreeze others later, ``detach`` and attach again.
        optimizer: The optimizer that moves them, or a list of optimizers. Inside a wrapper of
            Accelerate, Lightning, Fabric or Opacus it is found.
        strategy: When to synchronize, for example ``offbeat.SelSync()``. None is
            ``offbeat.StreamingAveraging()``, which has nothing to tune.
        group: The process group of the workers; None is the default group. Or a transport of your
            own, which makes a communicator: see ``offbeat.fabric.Transport``.
        node_group: The process group of this worker's node, whose workers are joined by a fast
            network: their gradients become their mean in every step, and so do buffers, and the
            strategy works between the nodes, of which each counts as one worker. "auto": nodes as
            torchrun has started them. ``group`` holds the workers of all nodes. Each of them
            carries an equal part of what the node sends, which is what ``stats`` counts. All nodes
            have as many workers, which take as many steps. The model may be one that
            ``fully_shard`` has divided over a mesh of the node's workers: each of them trains its
            shards with its counterparts, and torch averages the gradients inside; not with
            strategies that depend on when messages arrive (eager schedules, parameter servers).
            With none of these are ``distance_every``, data injection, ``on_failure="continue"``
            and, but for ``StreamingAveraging``, ``wire="auto"``. None: there are none.
        scaler: The GradScaler in use, if any. Iterations then count even where it skips a step.
        optimizer_state: "local" leaves each optimizer's state (momentum, second moments) as it is.
            "average" averages it whenever all workers wait for a mean of models, with
            ``LocalSGD``, ``SelSync`` (parameters), ``FedAvg`` and ``DiLoCo`` (no overlap); under
            ``BSP`` it is equal anyway. Costs its size on the wire, exactly, whatever ``wire``: as
            much as the model for momentum, twice that for Adam.
        wire: How means of parameters and gradients, and pushes to a parameter server and its
            answers, travel: "float32" as they are, "bfloat16" and "int8" in half and in about a
            quarter of the bytes, "int4" and "int2" in less, which is meant for
            ``StreamingAveraging``. "auto" chooses while training, by how long the workers wait; not
            with a parameter server or ``StreamingAveraging`` with the cyclic schedule. None is
            "int2" with ``StreamingAveraging`` else, and "float32" with all others. What rounding
            takes away is kept and added the next time (one model copy of memory, another one, of
            the last mean, unless gradients are averaged; for a parameter server see its
            strategies). Buffers and the final mean always travel as they are.
        log: Where a record of every step goes: a path (JSON lines, ``.rankN`` is added before the
            suffix unless the path contains ``{rank}``), a sink, or a list of them.
        distance_every: Measure at every so many own steps (≥ 1) how far apart the workers' models
            are, in the background: ``distance``, ``distance_largest`` and ``distance_step`` in the
            records and in ``Stats.details``. Sends the model once, which is not counted, and takes
            two copies of the parameters; see ``offbeat.training.distance.Distance``.
        gradient_change: Measure SelSync's Δ of this worker's own gradient in each step:
            ``relative_change`` in the records. Reads the gradients once, sends nothing.
        non_finite: What happens when a worker is about to contribute NaN or infinity to a mean,
            which would make all others so. "warn" logs it, once, with that worker's rank and the
            step. "raise" raises on all workers before any model has taken it in. "leave_out" gives
            that worker weight 0 in the round; it takes over the mean of the others, or goes on from
            the model that all have in common (``StreamingAveraging``, ``DiLoCo`` and
            ``AsyncAveraging``, which keeps one more copy for it), and what is not finite in its
            optimizer's state begins anew. Not with ``SelSync`` of gradients. With a parameter
            server, which knows no mean, "warn" and "raise" look at a worker's pushes, and speak on
            that worker alone: it raises before it pushes, and the others learn that it gave up. It
            costs one look at what is about to be sent, and no message: what becomes infinite after
            the look, in the step itself or ("warn", eager schedules) while the roll travels, is
            found one round later. Not looked at are gradients under a ``scaler``.
        max_grad_norm: Clip the gradients of each optimizer to this L2 norm (> 0) just before its
            step: what the strategy has made of them, so under ``BSP`` the mean. None does not.
        companions: Modules beside the model that follow it, such as a moving average of its
            parameters: each worker goes on with its own, from rank 0's, and in ``consensus`` and
            after ``finish`` they are the mean of all workers', counted alike. Never in between.
            ``save`` does not hold them: give their ``state_dict()`` as ``extra``.
        on_failure: What happens when a worker dies, hangs or is cut off. "raise" raises
            ``CommunicationError`` on all others. "continue" lets them go on without it, from what
            they have in common, and takes in workers that join; see docs/elastic.md for what is
            lost. With every strategy of this package; not with ``distance_every``, data injection,
            several optimizers under ``BSP``, ``FedAvg`` with ``weights``, or synchronous ``EASGD``
            with ``alpha``.
        min_workers: With "continue": with fewer workers than these all raise (≥ 1).
        timeout_seconds: How long an operation between workers may take before it fails on every
            worker with ``CommunicationTimeout``; a year at most. Larger than the longest time by
            which one worker may lag behind the others between two synchronizations.

    Returns:
        The synchronizer; also a context manager, which finishes on a clean exit and only detaches
        when an exception leaves the block.

    Raises:
        AttachError: no process group, a model or optimizer that is already attached, LBFGS, an
            optimizer without this model's parameters or with others, whose hooks do not work, or
            that communicates by itself; a DistributedDataParallel around the model that cannot be
            switched off, or an engine of DeepSpeed; a parameter or buffer that
            cannot be written in place (lazy, on the meta device, expanded, sparse, of
            ``torch.inference_mode()``, sharded without ``node_group``); ``on_failure="continue"``,
            ``node_group`` or a sharded model with what cannot; nodes that are not alike.
        MismatchError: another worker has another model, optimizer or strategy.
        CommunicationError: a worker did not take part.
        TypeError, ValueError: an argument that is none of the above.
    """
    if strategy is None:
        strategy = StreamingAveraging()
    if not isinstance(strategy, Strategy):
        raise TypeError(
            f"strategy must be a strategy such as offbeat.SelSync(), got {strategy!r}; "
            "offbeat.parse_strategy reads the text form"
        )
    wire = strategy.default_wire if wire is None else wire
    require_wire(wire, strategy)
    require_optimizer_state(optimizer_state, strategy)
    require_non_finite(non_finite, strategy)
    if distance_every is not None:
        require_integer("distance_every", distance_every, least=1)
    if not isinstance(gradient_change, bool):
        raise TypeError(f"gradient_change must be true or false, got {gradient_change!r}")
    if max_grad_norm is not None:
        require_number("max_grad_norm", max_grad_norm, POSITIVE)
    require_timeout(timeout_seconds)
    require_choice("on_failure", on_failure, ("raise", "continue"))
    require_integer("min_workers", min_workers, least=1)
    model = unwrapped(model)
    continues = on_failure == "continue"
    if node_group is not None:
        require_nodes(strategy, wire, distance_every, continues=continues)
    whole_only = {
        "companions": bool(companions),
        'optimizer_state="average"': optimizer_state == "average",
    }
    shards = shards_of(model, group, node_group, strategy, non_finite, whole_only)
    held = model if shards is None else shards
    require_usable(held)
    require_no_engine(model)
    require_beside(model, companions)
    require_apart(dict(held.named_parameters()), strategy)
    optimizers = _optimizers(optimizer)
    if optimizer_state == "average":
        require_own_state(optimizers)
    parts = _parts(model, optimizers)
    if shards is not None:
        parts = [replace(p, parameters=[*map(shards.shard, p.parameters)]) for p in parts]
    if continues:
        require_continuation(strategy, len(parts), distance_every, companions)
    elif min_workers != 1:
        raise ValueError(f'min_workers={min_workers} needs on_failure="continue"')
    if wire != "float32":
        kernels()  # loaded before anyone waits for this worker, as all do for one that joins
    around = AroundDDP(model, group, strategy, wire)
    try:
        team = _team(
            group, node_group, timeout_seconds, regroups=continues, sharded=shards is not None
        )
    except BaseException:
        around.remove()
        raise
    try:
        if not continues and team.view:
            raise AttachError('a worker that joins needs on_failure="continue", as the others have')
        if team.size < min_workers:
            raise AttachError(f"min_workers={min_workers}, and there are {team.size}")
        sync = Synchronizer(
            model,
            parts,
            strategy,
            team,
            scaler=scaler,
            means=Means(wire, optimizer_state),
            log=log,
            distance_every=distance_every,
            beside=partial(open_communicator, group, timeout_seconds, what="distance_every"),
            gradient_change=gradient_change,
            non_finite=non_finite,
            max_grad_norm=max_grad_norm,
            companions=companions,
            hooks=[around],
            min_workers=min_workers if continues else None,
            shards=shards,
        )
    except BaseException:
        around.remove()
        if continues and team.membership is not None:
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
    regroups: bool,
    sharded: bool,
) -> Team:
    if node_group is not None:
        communicator, node = open_nodes(group, node_group, timeout_seconds, sharded=sharded)
        return Team(communicator, node=node)
    return Team(
        open_communicator(group, timeout_seconds, what="offbeat.attach()", regroups=regroups)
    )


def _optimizers(given: Optimizer | Sequence[Optimizer]) -> list[Optimizer]:
    if isinstance(given, Iterable) and not isinstance(given, Optimizer):
        return [unwrapped_optimizer(one) for one in given]
    return [unwrapped_optimizer(given)]


def _parts(model: nn.Module, optimizers: Sequence[Optimizer]) -> list[Part]:
    """Which of the model's parameters each optimizer moves, in the model's order."""
    if not optimizers:
        raise AttachError("attach() needs at least one optimizer")
    named = {id(p): name for name, p in model.named_parameters()}
    parts: list[Part] = []
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
        parts.append(Part(len(parts), one, moved))
    for thing in (model, *optimizers):
        if thing in attached:
            raise AttachError(
                f"this {type(thing).__name__} is attached already: finish() or detach() the first "
                "synchronizer before attaching another"
            )
    return parts
