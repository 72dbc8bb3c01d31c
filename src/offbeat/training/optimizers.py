"""Wrapped optimizers: the one inside whose hooks fire, or a refusal; nothing was sent by then."""

import contextlib
import sys
from collections.abc import Iterable
from functools import cache
from typing import Any

from torch.optim import Optimizer

from offbeat.errors import AttachError

_INSIDE = ("optimizer", "original_optimizer")  # of Accelerate, Lightning and Fabric; of Opacus
_HOOKS = "_optimizer_step_pre_hooks"  # which torch makes in Optimizer.__init__
_COMMUNICATE = ("torch.distributed.optim", "opacus.optimizers.ddp", "deepspeed.runtime")


def unwrapped_optimizer(given: object) -> Optimizer:
    """The optimizer whose step hooks fire: ``given``, or the one inside.

    Raises:
        TypeError: ``given`` is no optimizer, and has none inside.
        AttachError: its step hooks do not work; or it communicates by itself.
    """
    while True:
        _require_silent(given)
        inside = next((x for n in _INSIDE if isinstance(x := _own(given, n), Optimizer)), None)
        if inside is None:
            break
        hooks = getattr(given, _HOOKS, None)
        if hooks is not None and hooks is not getattr(inside, _HOOKS, None):
            break  # it steps by itself, and the other one is its own affair
        given = inside
    if not isinstance(given, Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {given!r}")
    if not hasattr(given, _HOOKS):
        raise AttachError(
            f"the step hooks of this {type(given).__name__} do not work (it does not call "
            "Optimizer.__init__): attach the optimizer inside it"
        )
    return given


def _own(thing: object, name: str) -> object:
    with contextlib.suppress(Exception):  # a property that fails
        return getattr(thing, name, None)
    return None


def _require_silent(given: object) -> None:
    for kind in type(given).__mro__:
        if kind.__module__.startswith(_COMMUNICATE):
            raise AttachError(
                f"{kind.__name__} communicates in its step by itself, and the strategy would do "
                "so, too: use the plain optimizer of each worker"
            )


class StepHooked:
    """Lets the step hooks of an optimizer fire that has left out ``Optimizer.__init__``.

    timm's Lookahead does; its hooks would begin to fire when another part of torch has taken care
    of that, after the first step or never.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._attributes = vars(optimizer)
        self._before = self._attributes.get("step")
        self._mine: Any = None
        if getattr(type(optimizer).step, "hooked", False):
            return
        step = optimizer.step

        def whole(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
            return step(*args, **kwargs)

        hooked: Any = Optimizer.profile_hook_step(whole)
        self._mine = self._attributes["step"] = hooked.__get__(optimizer)

    def remove(self) -> None:
        """Let ``step`` be what it was, unless something else has wrapped it since."""
        if self._mine is None or self._attributes.get("step") is not self._mine:
            return
        if self._before is None:
            del self._attributes["step"]
        else:
            self._attributes["step"] = self._before


def require_own_state(optimizers: Iterable[Optimizer]) -> None:
    """Raise unless averaging ``optimizer.state`` would average what these optimizers remember.

    Raises:
        AttachError: one holds another optimizer, which remembers it.
    """
    for one in optimizers:
        if any(isinstance(value, Optimizer) for value in vars(one).values()):
            raise AttachError(
                f'optimizer_state="average": the state of this {type(one).__name__} may be that of '
                "the optimizer inside it; leave it out"
            )


def held_by(optimizer: Optimizer) -> list[Optimizer]:
    """Optimizers inside of ``optimizer`` that move the same parameters, and have step hooks."""
    mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return [
        value
        for value in vars(optimizer).values()
        if isinstance(value, Optimizer)
        and hasattr(value, _HOOKS)
        and any(id(p) in mine for group in value.param_groups for p in group["params"])
    ]


def _nothing(optimizer: Optimizer) -> None:
    pass


_WRAPPER: Any = Optimizer.profile_hook_step(_nothing)


def inside_step_of(optimizer: Optimizer) -> bool:
    """Whether the step that ends now is part of another step of the same optimizer.

    A class whose ``step`` calls that of its base fires the hooks of both; or of its own alone, as
    long as nobody has made an optimizer of the base class.
    """
    frame, steps = sys._getframe(1), 0
    while frame is not None:
        if frame.f_code is _WRAPPER.__code__ and frame.f_locals["args"][0] is optimizer:
            steps += 1
        frame = frame.f_back  # type: ignore[assignment]
    return steps > 1


def has_nested_steps(optimizer: Optimizer) -> bool:
    """Whether the hooks may fire for a step inside a step."""
    kind: object = type(optimizer)
    return _steps_of(kind) + ("step" in vars(optimizer)) > 1


@cache  # asked in every step
def _steps_of(kind: Any) -> int:
    """How many classes of this one's line have a ``step`` of their own."""
    return sum("step" in vars(one) for one in kind.__mro__ if one is not Optimizer)
