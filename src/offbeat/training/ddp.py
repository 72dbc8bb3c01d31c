"""Switches off DistributedDataParallel (DDP) in the model that ``attach`` was given.

Frameworks such as Lightning wrap a model in DDP, which averages all gradients in every step. Under
a strategy this communication is switched off, or the strategy would save nothing. ``attach``
finds only wrappers in the given model. A wrapper around that model, or a later one, stays active.
"""

import contextlib
import logging
from contextlib import ExitStack

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from offbeat.errors import AttachError
from offbeat.nodes.detection import NodeGroup, node_ranks
from offbeat.transport.communicator import Transport
from offbeat.transport.torch_backend.process_groups import ranks_text

logger = logging.getLogger("offbeat")
_FLAG = "_offbeat_backward_grad_sync"  # attribute with the flag of a wrapper during forward


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside all DistributedDataParallel wrappers of ``model``."""
    while isinstance(model, DistributedDataParallel):
        model = model.module
    return model


def suppress_ddp(
    model: nn.Module,
    group: dist.ProcessGroup | Transport | None,
    node_group: NodeGroup | None,
    undo: ExitStack,
) -> list[DistributedDataParallel]:
    """Switch off each DistributedDataParallel in ``model``, until ``undo`` is closed.

    ``model`` is what the user has given to ``attach``: a wrapper, a model that contains wrappers,
    or a plain model.

    Returns:
        The wrappers; none once ``undo`` is closed. Frameworks accumulate gradients inside
        ``no_sync`` of a wrapper. Its ``require_backward_grad_sync`` is then False.

    Raises:
        AttachError: a wrapper cannot be switched off, or averages over other workers than those
            of ``group``, or of ``node_group``. Both are those of ``attach``.
    """
    wrappers = [m for m in model.modules() if isinstance(m, DistributedDataParallel)]
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if hasattr(world, "make_communicator"):  # a simulated group, in which DDP sends nothing
        return wrappers
    attach_group = group if isinstance(group, dist.ProcessGroup) else world
    # Check all wrappers first: an error must leave every wrapper active.
    for wrapper in wrappers:
        allowed = [dist.get_process_group_ranks(attach_group)]
        if node_group is not None and isinstance(node := node_ranks(group, node_group), list):
            allowed.append(node)  # text is an error, which open_nodes raises
        _require_suppressible(wrapper, allowed)
    for wrapper in wrappers:
        _suppress(wrapper, undo)
    undo.callback(wrappers.clear)
    return wrappers


def _suppress(wrapper: DistributedDataParallel, undo: ExitStack) -> None:
    logger.info("DistributedDataParallel around the attached model is switched off")
    wrapper.require_forward_param_sync = False  # no broadcast of buffers before a forward pass
    undo.callback(setattr, wrapper, "require_forward_param_sync", True)
    # ``with wrapper.join():`` would wait for all-reduces that the others no longer start.
    vars(wrapper)["join"] = lambda *_, **__: contextlib.nullcontext()
    undo.callback(vars(wrapper).pop, "join")
    # DDP reads its flag in forward only. Outside, the flag shows whether no_sync() is active.
    undo.callback(wrapper.register_forward_pre_hook(_switch_off, prepend=True).remove)
    undo.callback(wrapper.register_forward_hook(_switch_on, always_call=True).remove)


def _switch_off(wrapper: DistributedDataParallel, args: object) -> None:
    vars(wrapper)[_FLAG] = wrapper.require_backward_grad_sync
    wrapper.require_backward_grad_sync = False


def _switch_on(wrapper: DistributedDataParallel, args: object, result: object) -> None:
    wrapper.require_backward_grad_sync = vars(wrapper).pop(_FLAG)


def _require_suppressible(wrapper: DistributedDataParallel, allowed: list[list[int]]) -> None:
    """Raise AttachError unless ``wrapper`` has ``allowed`` ranks and can be switched off."""
    ranks = dist.get_process_group_ranks(wrapper.process_group)
    if set(ranks) not in map(set, allowed):
        raise AttachError(
            f"the model is inside a DistributedDataParallel over {ranks_text(ranks)}, and "
            f"attach() trains it over {ranks_text(allowed[0])}: give both the same group, and "
            "give node_group to average the gradients of each node in every step"
        )
    # With these options DDP communicates even if the flags in _switch_off are False. The
    # attribute of the last one is private, and DDP has no public one.
    unsupported = {
        "static_graph": wrapper.static_graph,
        "mixed_precision": wrapper.mixed_precision is not None,
        "delay_all_reduce_named_params": getattr(wrapper, "_delay_all_reduce_params", None),
    }
    for name, used in unsupported.items():
        if used:
            raise AttachError(
                f"the model is inside a DistributedDataParallel with {name}, whose reduction "
                "cannot be switched off: do not use it, or attach without the wrapper"
            )
