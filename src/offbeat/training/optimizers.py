"""Support for optimizers that wrap or contain another one, or whose step hooks do not fire.

The step hooks of torch (``register_step_pre_hook`` and ``register_step_post_hook``) must fire once
before and once after each step. The functions here find the optimizer whose hooks should be used,
make its hooks work, or raise an error.
"""

import contextlib
from typing import Any

from torch.optim import Optimizer

from offbeat.errors import AttachError

# Attributes in which wrappers hold their optimizer. "optimizer": Accelerate, Lightning, Fabric.
# "original_optimizer": Opacus.
_WRAPPED = ("optimizer", "original_optimizer")
_COMMUNICATING = ("torch.distributed.optim", "opacus.optimizers.ddp", "deepspeed.runtime")


def unwrapped_optimizer(given: object) -> Optimizer:
    """Return the optimizer whose step hooks should be used: ``given``, or the one inside wrappers.

    An optimizer that contains another one but has separate step hooks is not a wrapper.
    """
    while True:
        _require_no_communication(given)
        inner = next(
            (x for name in _WRAPPED if isinstance(x := _attribute(given, name), Optimizer)), None
        )
        if inner is None:
            break
        hooks = _step_hooks(given)
        if hooks is not None and hooks is not _step_hooks(inner):
            break  # `given` has separate hooks
        given = inner
    if not isinstance(given, Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {given!r}")
    if _step_hooks(given) is None:
        raise AttachError(
            f"the step hooks of this {type(given).__name__} do not work (it does not call "
            "Optimizer.__init__): attach the optimizer inside it"
        )
    return given


def _attribute(thing: object, name: str) -> object:
    with contextlib.suppress(Exception):  # a property may raise any exception
        return getattr(thing, name, None)
    return None


def _step_hooks(optimizer: object) -> object | None:
    """Return the dictionary of the step hooks, which ``Optimizer.__init__`` creates, or None."""
    with contextlib.suppress(AttributeError):
        handle = optimizer.register_step_pre_hook(lambda *_: None)  # type: ignore[attr-defined]
        handle.remove()
        hooks: object = handle.hooks_dict_ref()
        return hooks
    return None


def _require_no_communication(given: object) -> None:
    for kind in type(given).__mro__:
        if kind.__module__.startswith(_COMMUNICATING):
            raise AttachError(
                f"{kind.__name__} communicates in its step by itself, and the strategy would do "
                "so, too: use the plain optimizer of each worker"
            )


def enable_step_hooks(optimizer: Optimizer) -> None:
    """Make the step hooks of ``optimizer`` fire, although torch has not wrapped its ``step``.

    ``Optimizer.__init__`` wraps the ``step`` of the optimizer's class in a function that runs the
    hooks. Some classes, such as timm's Lookahead, do not call ``Optimizer.__init__``. Then this
    function wraps the ``step`` of the given optimizer alone.
    """
    if getattr(type(optimizer).step, "hooked", False) or getattr(optimizer.step, "hooked", False):
        return
    step = optimizer.step

    def unhooked_step(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
        return step(*args, **kwargs)

    hooked: Any = Optimizer.profile_hook_step(unhooked_step)
    hooked.hooked = True
    vars(optimizer)["step"] = hooked.__get__(optimizer)


def inner_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers that are attributes of ``optimizer`` and share parameters with it."""
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return [
        value
        for value in vars(optimizer).values()
        if isinstance(value, Optimizer)
        and _step_hooks(value) is not None
        and any(id(p) in own for group in value.param_groups for p in group["params"])
    ]
