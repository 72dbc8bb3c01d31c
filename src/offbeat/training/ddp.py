"""DistributedDataParallel around an attached model: it does not average the gradients as well.

Frameworks wrap every model in it. Left at work under a strategy it averages every gradient in every
step, and the strategy saves nothing. So it is found, whenever it is made, and its communication is
switched off; or, inside a node whose workers train in different groups, it is left at work.
"""

import gc
import logging
import sys
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from offbeat.errors import AttachError
from offbeat.quantization.wire import Precision
from offbeat.strategies.base import Strategy
from offbeat.training.compatibility import repeatable
from offbeat.transport.communicator import Transport

logger = logging.getLogger("offbeat")
_Kind = TypeVar("_Kind", bound=nn.Module)
_ADVICE = "or let one group hold all workers, without DistributedDataParallel"


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside its DistributedDataParallel, if it has one."""
    while isinstance(model, DistributedDataParallel):
        model = model.module
    return model


def require_no_engine(model: nn.Module) -> None:
    """Raise if an engine of DeepSpeed holds the model.

    It averages gradients or divides them and the optimizer's state among the workers, in calls of
    its own that cannot be switched off.

    Raises:
        AttachError: one does.
    """
    module = sys.modules.get("deepspeed.runtime.engine")  # whoever has one has imported it
    if module is None:
        return
    mine = {id(p) for p in model.parameters()}
    for engine in living(module.DeepSpeedEngine):
        if not mine.isdisjoint(map(id, engine.parameters())):
            raise AttachError(
                f"the model is inside a {type(engine).__name__} of DeepSpeed, which averages "
                "gradients, or divides the model, by itself: train without DeepSpeed"
            )


class AroundDDP:
    """Keeps each DistributedDataParallel over parameters of ``model`` from reducing, until removed.

    One whose process group has just this worker in common with ``group`` stays as it is: there the
    workers of a node share one model, and each of them trains it together with its counterparts in
    other nodes. The mean must then be the same for all of a node, so it may not depend on time.

    Args:
        model: The attached model.
        group: As given to ``attach``.
        strategy: What averages.
        wire: As given to ``attach``.

    Attributes:
        steps: Gives the iterations so far.

    Raises:
        AttachError: one that is there already cannot be switched off, or may not stay.
    """

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup | Transport | None,
        strategy: Strategy,
        wire: Precision,
    ) -> None:
        self.steps: Callable[[], int] = lambda: 0
        self._mine = {id(p) for p in model.parameters()}
        self._strategy, self._wire = strategy, wire
        self._hooks: list[RemovableHandle] = []
        self._quiet: list[DistributedDataParallel] = []
        world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        if hasattr(world, "make_communicator"):  # the simulator's: there is no reducing there
            return
        self._members: list[int] = []
        if world is not None:
            known = group if isinstance(group, dist.ProcessGroup) else world
            self._members = dist.get_process_group_ranks(known)
            for wrapper in living(DistributedDataParallel):
                if hasattr(wrapper, "reducer") and self._concerns(wrapper):
                    self._judge(wrapper)
        self._hooks.append(register_module_module_registration_hook(self._registered))

    def _concerns(self, module: nn.Module) -> bool:
        return not self._mine.isdisjoint(map(id, module.parameters()))

    def _registered(self, module: nn.Module, name: str, submodule: nn.Module | None) -> None:
        """A module was given to another one: perhaps a wrapper is being made."""
        if not isinstance(module, DistributedDataParallel) or submodule is None:
            return
        if not self._concerns(submodule):
            return
        if self.steps():
            raise AttachError(
                "DistributedDataParallel would give all workers rank 0's model in the middle of "
                "the training: wrap the model before the first step, or not at all"
            )

        def first(wrapper: DistributedDataParallel, args: object) -> None:
            hook.remove()  # it is complete by now
            self._judge(wrapper)

        hook = module.register_forward_pre_hook(first, prepend=True)
        self._hooks.append(hook)

    def _judge(self, wrapper: DistributedDataParallel) -> None:
        """Switch it off, let it be, or raise."""
        ranks = dist.get_process_group_ranks(wrapper.process_group)
        common = set(ranks) & set(self._members)
        if len(ranks) == 1:
            return
        if len(common) == 1:
            require_repeatable(self._strategy, self._wire)
            return
        if set(ranks) != set(self._members):
            raise AttachError(
                f"the model is inside a DistributedDataParallel over ranks {_shown(ranks)}, and "
                f"attach() trains it over ranks {_shown(self._members)}: give both the same group, "
                "or groups that have one worker in common (of a node, and across nodes)"
            )
        # These reduce by hooks of their own, which the switches below do not reach.
        odd = {
            "static_graph": wrapper.static_graph,
            "mixed_precision": wrapper.mixed_precision is not None,
            "delay_all_reduce_named_params": getattr(wrapper, "_delay_all_reduce_params", None),
        }
        for name, used in odd.items():
            if used:
                raise AttachError(
                    f"the model is inside a DistributedDataParallel with {name}, whose reduction "
                    "cannot be switched off: leave that away, or attach without the wrapper"
                )
        logger.info("DistributedDataParallel around the attached model is switched off")
        self._quiet.append(wrapper)
        _silence(wrapper)
        # In each pass anew: no_sync() and its like in the frameworks put back what was before.
        self._hooks.append(wrapper.register_forward_pre_hook(_silence, prepend=True))

    def remove(self) -> None:
        """Let them reduce again, and watch no more."""
        for hook in self._hooks:
            hook.remove()
        for wrapper in self._quiet:
            wrapper.require_backward_grad_sync = wrapper.require_forward_param_sync = True
        self._hooks, self._quiet = [], []
        self.steps = lambda: 0


def _silence(wrapper: DistributedDataParallel, args: object = None) -> None:
    wrapper.require_backward_grad_sync = False
    wrapper.require_forward_param_sync = False  # that of the buffers before each pass


def require_repeatable(strategy: Strategy, wire: Precision) -> None:
    """Raise unless all workers of a node compute the same, each with its own group.

    They know nothing of each other, so nothing may depend on when messages arrive.

    Args:
        strategy: What averages.
        wire: As given to ``attach``.

    Raises:
        AttachError: what they compute depends on when messages arrive.
    """
    if not repeatable(strategy):
        raise AttachError(
            f"the workers of a node would get different models: {strategy} depends on when "
            "messages arrive, and their gradients are averaged in each step for one model. "
            f"Use BSP, LocalSGD, SelSync, DiLoCo or a cyclic schedule, {_ADVICE}"
        )
    if wire == "auto":
        raise AttachError(
            'the workers of a node would get different models: wire="auto" chooses by how long '
            f"each group waits. Name a precision, {_ADVICE}"
        )


def living(kind: type[_Kind]) -> Iterable[_Kind]:
    """All objects of ``kind`` and its subclasses in this process, but those of ``gc.freeze``."""
    kinds: list[type[_Kind]] = [kind]
    for one in kinds:
        kinds.extend(one.__subclasses__())
    return [one for one in gc.get_referrers(*kinds) if isinstance(one, kind)]


def _shown(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))
