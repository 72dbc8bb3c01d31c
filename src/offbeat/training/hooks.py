"""Hooks on the user's optimizers and GradScaler, which report each step to ``Iteration``."""

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from offbeat.averaging import AttachedOptimizer
from offbeat.errors import AttachError
from offbeat.training.iteration import Iteration
from offbeat.training.learning_rate.step_factor import StepFactor
from offbeat.training.optimizers import enable_step_hooks

attached: "weakref.WeakSet[Any]" = weakref.WeakSet()
"""Models and optimizers that are attached in this process."""
_iterations: "weakref.WeakSet[Iteration]" = weakref.WeakSet()
_SCALER_STEP = torch.amp.GradScaler.step.__code__


class Removable(Protocol):
    """A change to an object of the user that can be undone."""

    def remove(self) -> None:
        """Undo the change."""


def hook_optimizer(
    attached: AttachedOptimizer,
    iteration: Iteration,
    factor: StepFactor | None,
    *,
    scaled: bool,
) -> list[Removable]:
    """Call ``iteration.before_step`` before and ``iteration.complete`` after every optimizer step.

    ``factor`` changes the learning rates during the step. In a step with a closure, ``before_step``
    is called after the closure.

    A step raises AttachError in these cases:

    - The optimizer does not call its closure exactly once.
    - The first step communicates, although the workers do not step together.
    - A GradScaler calls the first step, and ``scaled`` is False.
    - An unknown optimizer steps the same parameters; see ``_require_known``.
    """
    optimizer, index = attached.optimizer, attached.index
    uncalled = False
    first, collectives = True, -1  # number of collectives when the first step began

    def before(_: Optimizer, args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]] | None:
        nonlocal uncalled, first, collectives
        # A step may call the hooked step of its base class. Both are the same step.
        first = first and (collectives < 0 or iteration.in_step)
        if first and not scaled:
            _require_no_scaler()
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        iteration.in_step, uncalled, changed = True, closure is not None, None
        if closure is None:
            iteration.before_step(index)
        elif len(args) > 1:
            changed = (args[0], called_once(closure), *args[2:]), kwargs
        else:
            changed = args, {**kwargs, "closure": called_once(closure)}
        if factor is not None:
            factor.apply()
        if collectives < 0:
            collectives = _own_collectives()
        return changed

    def called_once(closure: Callable[[], Any]) -> Callable[[], Any]:
        called = False

        def once() -> Any:
            nonlocal called, uncalled
            if called:
                raise AttachError(
                    f"{type(optimizer).__name__} calls its closure more than once a step, "
                    "which cannot be synchronized; call it outside of step()"
                )
            called, uncalled = True, False
            loss = closure()
            iteration.before_step(index)
            return loss

        return once

    def after(_: Optimizer, args: Any, kwargs: Any) -> None:
        iteration.in_step = False
        if first and not iteration.flow.replicates and _own_collectives() != collectives:
            raise AttachError(
                f"{type(optimizer).__name__} (or its closure) communicates in its step, and under "
                f"{iteration.flow.strategy} the workers do not step together: use an optimizer "
                "that does not divide its work among the workers, or BSP()"
            )
        if uncalled:
            raise AttachError(
                f"{type(optimizer).__name__} took a step without calling its closure, so its "
                "gradients were not synchronized; call the closure outside of step()"
            )
        # A fused optimizer skips the step itself if a GradScaler has found an overflow.
        overflow = getattr(optimizer, "found_inf", None)
        iteration.complete(index, skipped=overflow is not None and bool(overflow))

    # A training step under torch.compile would otherwise trace into the communication.
    untraced: Callable[[Any], Any] = torch.compiler.disable
    enable_step_hooks(optimizer)
    _iterations.add(iteration)
    _watch_all_optimizers()
    return [
        *([] if factor is None else [factor]),
        optimizer.register_step_pre_hook(untraced(before)),
        optimizer.register_step_post_hook(untraced(after)),
    ]


@functools.cache
def _watch_all_optimizers() -> None:
    """Call ``_require_known`` before each step of any optimizer in this process."""
    register_optimizer_step_pre_hook(torch.compiler.disable(_require_known))


def _require_known(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Raise AttachError if an unknown optimizer steps parameters that are averaged.

    Attached optimizers and optimizers that contain one of them are known. During a step of an
    attached optimizer, others may step, too. SAM (sharpness-aware minimization) contains another
    optimizer. If the training loop calls ``first_step()`` and ``second_step()``, this one steps
    outside of ``SAM.step()``, so it must be attached.
    """
    if optimizer in attached:
        return
    inside = [each for each in vars(optimizer).values() if isinstance(each, Optimizer)]
    if any(each in attached for each in inside):
        return
    moved = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for iteration in _iterations:
        if iteration.active and not iteration.in_step and not moved.isdisjoint(iteration.trained):
            raise AttachError(
                f"this {type(optimizer).__name__} steps parameters of the attached model, and "
                "attach() does not know it, so that its steps would not be synchronized: give all "
                "optimizers to attach() (of an optimizer that contains another, the inner one), or "
                "detach() and attach again with the new one"
            )


def _own_collectives() -> int:
    """Return how many collectives the script has started in the default process group.

    0 in a group that does not count them. Torch has no public counter.
    """
    group: Any = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    with contextlib.suppress(AttributeError, RuntimeError):
        return int(group._get_sequence_number_for_group())
    return 0


def _require_no_scaler() -> None:
    """Raise AttachError if a GradScaler has called the step that is about to begin."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is _SCALER_STEP and frame.f_locals["self"].is_enabled():
            raise AttachError(
                "a GradScaler takes the steps, and attach() does not know it, so the workers would "
                "count different steps: attach(..., scaler=scaler)"
            )
        frame = frame.f_back


class ScalerHooks:
    """Hooks on ``unscale_`` and ``step`` of a GradScaler, which report steps to ``iteration``.

    A scaler skips ``optimizer.step`` on each worker whose gradients overflowed. The hooks of the
    optimizer do not fire then, so these hooks count the skipped step. Otherwise the next step of
    that worker would be averaged with the current step of the other workers.
    """

    def __init__(self, scaler: torch.amp.GradScaler, iteration: Iteration) -> None:
        self._scaler = scaler
        self._iteration = iteration
        self._unscaled: set[Optimizer] = set()
        self._unscale, self._step = scaler.unscale_, scaler.step
        self._methods = {"unscale_": self._hooked_unscale, "step": self._hooked_step}
        self._before = {name: vars(scaler).get(name) for name in self._methods}
        vars(scaler).update(self._methods)

    def remove(self) -> None:
        """Restore the scaler's methods, unless another attached training has replaced them, too."""
        attributes = vars(self._scaler)
        for name, before in self._before.items():
            if attributes.get(name) != self._methods[name]:
                continue
            if before is None:
                del attributes[name]
            else:
                attributes[name] = before

    def _hooked_unscale(self, optimizer: Optimizer) -> None:
        index = self._iteration.index_of(optimizer)
        if index is not None:
            self._iteration.handle_gradients(index)
            self._unscaled.add(optimizer)
        self._unscale(optimizer)
        if index is not None:
            self._iteration.unscaled(index)

    def _hooked_step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        index = self._iteration.index_of(optimizer)
        if index is None or not self._scaler.is_enabled():
            return self._step(optimizer, *args, **kwargs)
        if optimizer not in self._unscaled:  # a fused optimizer would unscale inside its step()
            self._scaler.unscale_(optimizer)
        self._unscaled.discard(optimizer)
        self._iteration.before_step(index)
        result = self._step(optimizer, *args, **kwargs)
        self._iteration.complete(index, skipped=True)  # unless the hooks have completed it
        return result
