"""Hooks on the user's optimizers and GradScaler, which report each step to ``Iteration``."""

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType
from typing import Any

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


class StepHooks:
    """Hooks on the steps of an optimizer: ``iteration.before_step`` and ``iteration.complete``.

    In a step with a closure, ``before_step`` is called after the closure. A step raises AttachError
    in these cases:

    - The optimizer does not call its closure exactly once.
    - The first step communicates, although the workers do not step together.
    - A GradScaler calls the first step, and ``scaled`` is False.
    - An unknown optimizer steps the same parameters; see ``_require_known``.

    Args:
        attached: The optimizer.
        iteration: Receives the reports.
        factor: Changes the learning rates. None: they do not change.
        undo: Removes the hooks when it is closed.
        scaled: True if ``attach`` was given an enabled GradScaler.
    """

    def __init__(
        self,
        attached: AttachedOptimizer,
        iteration: Iteration,
        factor: StepFactor | None,
        undo: ExitStack,
        *,
        scaled: bool,
    ) -> None:
        self._index, self._kind = attached.index, type(attached.optimizer).__name__
        self._iteration, self._factor, self._scaled = iteration, factor, scaled
        self._first = True  # in the first step
        self._collectives = -1  # number at the begin of the first step
        self._uncalled = False  # True in a step with a closure, until it is called
        # A training step under torch.compile would otherwise trace into the communication.
        untraced: Callable[[Any], Any] = torch.compiler.disable
        enable_step_hooks(attached.optimizer)
        _iterations.add(iteration)
        _watch_all_optimizers()
        before, after = untraced(self._before), untraced(self._after)
        undo.callback(attached.optimizer.register_step_pre_hook(before).remove)
        undo.callback(attached.optimizer.register_step_post_hook(after).remove)

    def _before(self, _: Optimizer, args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]] | None:
        iteration = self._iteration
        # A step may call the hooked step of its base class.
        self._first = self._first and (self._collectives < 0 or iteration.in_step)
        if self._first and not self._scaled:
            _require_no_scaler()
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        iteration.in_step, self._uncalled, changed = True, closure is not None, None
        if closure is None:
            iteration.before_step(self._index)
        elif len(args) > 1:
            changed = (args[0], self._called_once(closure), *args[2:]), kwargs
        else:
            changed = args, {**kwargs, "closure": self._called_once(closure)}
        if self._factor is not None:
            self._factor.apply()
        if self._collectives < 0:
            self._collectives = _own_collectives()
        return changed

    def _called_once(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        called = False

        def once() -> Any:
            nonlocal called
            if called:
                raise AttachError(
                    f"{self._kind} calls its closure more than once a step, which cannot be "
                    "synchronized; call it outside of step()"
                )
            called, self._uncalled = True, False
            loss = closure()
            self._iteration.before_step(self._index)
            return loss

        return once

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        iteration = self._iteration
        iteration.in_step = False
        if (
            self._first
            and not iteration.flow.replicates
            and _own_collectives() != self._collectives
        ):
            raise AttachError(
                f"{self._kind} (or its closure) communicates in its step, and under "
                f"{iteration.flow.strategy} the workers do not step together: use an optimizer "
                "that does not divide its work among the workers, or BSP()"
            )
        if self._uncalled:
            raise AttachError(
                f"{self._kind} took a step without calling its closure, so its gradients were not "
                "synchronized; call the closure outside of step()"
            )
        # A fused optimizer skips the step itself if a GradScaler has found an overflow.
        overflow = getattr(optimizer, "found_inf", None)
        iteration.complete(self._index, skipped=overflow is not None and bool(overflow))


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
