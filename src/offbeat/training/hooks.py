"""Hooks on the user's own objects: optimizers, which stay what they are, and a GradScaler."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from offbeat.errors import AttachError
from offbeat.training.clipping import Clipping
from offbeat.training.iteration import Iteration
from offbeat.training.optimizers import (
    StepHooked,
    has_nested_steps,
    held_by,
    inside_step_of,
)


class Removable(Protocol):
    """What was hooked to something of the user's, until ``remove``."""

    def remove(self) -> None:
        """Take it off."""


def hook_optimizer(
    optimizer: Optimizer,
    index: int,
    iteration: Iteration,
    clipping: Clipping,
    told: Callable[[Any], None],
) -> list[Removable]:
    """Call ``clipping.step`` and ``complete`` around every step; tell a closure's loss."""
    at_work = False

    def before(_: Optimizer, args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]] | None:
        nonlocal at_work
        at_work = True
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            clipping.step(index)
            return None
        calls: list[bool] = []

        def counted() -> Any:
            if calls:
                raise AttachError(
                    f"{type(optimizer).__name__} calls its closure more than once a step, "
                    "which cannot be synchronized; call it outside of step()"
                )
            calls.append(True)
            loss = closure()
            told(loss)
            clipping.step(index)
            return loss

        if len(args) > 1:
            return (args[0], counted, *args[2:]), kwargs
        return args, {**kwargs, "closure": counted}

    def after(_: Optimizer, args: Any, kwargs: Any) -> None:
        nonlocal at_work
        if not (has_nested_steps(optimizer) and inside_step_of(optimizer)):
            at_work = False
            iteration.complete(index)

    def alone(inside: Optimizer, args: Any, kwargs: Any) -> None:
        if not at_work:  # as where SAM's two halves are called one by one: no step is seen
            raise AttachError(
                f"the {type(inside).__name__} inside this {type(optimizer).__name__} took a step "
                f"outside of {type(optimizer).__name__}.step(), which would not be synchronized: "
                "attach the optimizer inside"
            )

    # Where a user compiles the step, the compiler would go on into all that communicates.
    untraced: Callable[[Any], Any] = torch.compiler.disable
    return [
        StepHooked(optimizer),
        optimizer.register_step_pre_hook(untraced(before)),
        optimizer.register_step_post_hook(untraced(after)),
        *(inside.register_step_pre_hook(untraced(alone)) for inside in held_by(optimizer)),
    ]


class ScalerHooks:
    """Watches ``scaler.unscale_`` and ``scaler.step`` of one scaler until ``remove``.

    Iterations count even where a GradScaler skips a step. It skips ``optimizer.step`` on a worker
    whose gradients overflowed, and only there: the optimizer's hooks do not fire, and that worker
    would average its next iteration with the others' current one.
    """

    def __init__(self, scaler: torch.amp.GradScaler, iteration: Iteration) -> None:
        self._scaler = scaler
        self._iteration = iteration
        self._unscaled: set[Optimizer] = set()
        self._unscale, self._step = scaler.unscale_, scaler.step
        scaler.unscale_ = self._watched_unscale  # type: ignore[method-assign]
        scaler.step = self._watched_step  # type: ignore[method-assign]

    def remove(self) -> None:
        """Give the scaler its own methods back."""
        del self._scaler.unscale_
        del self._scaler.step

    def _watched_unscale(self, optimizer: Optimizer) -> None:
        index = self._iteration.index_of(optimizer)
        if index is not None:
            if not self._iteration.flow.needs_unscaled:
                # The mean of scaled gradients, so that all workers see the same overflow.
                watched = self._iteration.watches_gradients
                scale = self._scaler.get_scale() if watched else 1.0
                self._iteration.prepare(index, loss_scale=scale)
            self._iteration.average_inside(index)
            self._unscaled.add(optimizer)
        self._unscale(optimizer)

    def _watched_step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        index = self._iteration.index_of(optimizer)
        if index is None or not self._scaler.is_enabled():
            return self._step(optimizer, *args, **kwargs)
        if optimizer not in self._unscaled:  # fused optimizers would unscale inside of step()
            self._scaler.unscale_(optimizer)
        self._unscaled.discard(optimizer)
        self._iteration.prepare(index)
        result = self._step(optimizer, *args, **kwargs)
        if self._iteration.awaits_step(index):
            self._iteration.complete(index, skipped=True)
        return result
