"""Automatic mixed precision: iterations count even where a GradScaler skips a step.

A GradScaler skips ``optimizer.step`` on a worker whose gradients overflowed, and only there. The
optimizer's hooks do not fire then, and that worker would average its next iteration with the
others' current one. So two methods of the scaler are watched while a synchronizer is attached.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

if TYPE_CHECKING:
    from offbeat.attach import Synchronizer


class ScalerHooks:
    """Watches ``scaler.unscale_`` and ``scaler.step`` of one scaler until ``remove``."""

    def __init__(self, scaler: torch.amp.GradScaler, synchronizer: "Synchronizer") -> None:
        self._scaler = scaler
        self._synchronizer = synchronizer
        self._unscaled: set[Optimizer] = set()
        self._unscale, self._step = scaler.unscale_, scaler.step
        scaler.unscale_ = self._watched_unscale  # type: ignore[method-assign]
        scaler.step = self._watched_step  # type: ignore[method-assign]

    def remove(self) -> None:
        """Give the scaler its own methods back."""
        del self._scaler.unscale_
        del self._scaler.step

    def _watched_unscale(self, optimizer: Optimizer) -> None:
        index = self._synchronizer.index_of(optimizer)
        if index is not None:
            if not self._synchronizer.strategy.needs_unscaled:
                # The mean of scaled gradients, so that all workers see the same overflow.
                self._synchronizer.prepare(index)
            self._unscaled.add(optimizer)
        self._unscale(optimizer)

    def _watched_step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        index = self._synchronizer.index_of(optimizer)
        if index is None or not self._scaler.is_enabled():
            return self._step(optimizer, *args, **kwargs)
        if optimizer not in self._unscaled:  # fused optimizers would unscale inside of step()
            self._scaler.unscale_(optimizer)
        self._unscaled.discard(optimizer)
        self._synchronizer.prepare(index)
        result = self._step(optimizer, *args, **kwargs)
        if self._synchronizer.awaits_step(index):
            self._synchronizer.complete(index)
        return result
