"""Factors on the learning rates of an optimizer, in effect only inside ``optimizer.step()``.

Strategies that average models need them. Each local step of Adam is too short, because Adam divides
by the noise of one worker's batch; see ``adam_correction``. Streaming averaging multiplies the mean
update of the workers by an outer gain G. An automatic G above 1 divides the learning rates of SGD
by √G, and a G below 1 divides those of SGD and of a corrected Adam by G.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch.optim import Optimizer

from offbeat.training.learning_rate.adam_correction import AdamCorrection


class StepFactor:
    """Multiplies the learning rates of one optimizer by factors in each of its steps.

    The learning rates change only inside ``optimizer.step()``, so schedulers see their own values.

    Args:
        optimizer: The optimizer.
        lr_factor: Returns the factor (> 0) of the strategy for the next step.
        undo: Removes the hooks and restores the learning rates when it is closed.
        correction: Measures a further factor f for each parameter group. Decoupled weight decay
            (AdamW) is divided by f, so that f leaves learning rate × weight decay unchanged. None:
            f = 1.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        lr_factor: Callable[[], float],
        undo: ExitStack,
        correction: AdamCorrection | None = None,
    ) -> None:
        self._optimizer, self._lr_factor, self._correction = optimizer, lr_factor, correction
        self._undo = undo
        # Each parameter group, with the values before the step. Empty outside of steps.
        self._saved: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._hooked = False  # the hooks are added before the first factor that is not 1
        undo.callback(self._restore)

    def _add_hooks(self) -> None:
        untraced: Any = torch.compiler.disable  # a compiled step would contain the hooks
        after = self._optimizer.register_step_post_hook(untraced(self._after))
        # Before all other hooks: a scheduler in a hook, or a sink, must not see changed rates.
        hooks: Any = after.hooks_dict_ref()  # an OrderedDict
        hooks.move_to_end(after.id, last=False)
        self._undo.callback(after.remove)
        saved = self._optimizer.register_state_dict_post_hook(self._without_factors)
        self._undo.callback(saved.remove)
        self._hooked = True

    def apply(self) -> None:
        """Multiply the learning rates until the end of the step that begins now."""
        if self._saved:  # an earlier step has failed, or this step runs inside another one
            self._restore()
        correction, groups = self._correction, self._optimizer.param_groups
        corrected = correction.factors() if correction is not None else [1.0] * len(groups)
        common = self._lr_factor()
        if common == 1 and correction is None:
            return
        if not self._hooked:
            self._add_hooks()
        for group, factor in zip(groups, corrected, strict=True):
            # Not in place: by default all groups share the tensor of a learning rate.
            changed = {"lr": group["lr"] * (factor * common)}
            if group.get("decoupled_weight_decay"):
                changed["weight_decay"] = group["weight_decay"] * (1 / factor)
            self._saved.append((group, {name: group[name] for name in changed}))
            group.update(changed)

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._saved:
            self._restore()
        if self._correction is not None:
            self._correction.stepped()

    def _restore(self) -> None:
        for group, values in self._saved:
            group.update(values)
        self._saved.clear()

    def _without_factors(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Restore the values in a state, which a worker that joins may get inside ``step()``."""
        for (_, values), group in zip(self._saved, state["param_groups"], strict=False):
            group.update(values)
