"""Detects ``load_state_dict`` on an attached model.

A strategy may store the shared model, and would undo values that are loaded into the local model.
"""

import contextlib
import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from offbeat.averaging import Worker
from offbeat.averaging.votes import ANCHORS
from offbeat.checkpoint.state import digest
from offbeat.errors import AttachError
from offbeat.training.iteration import Iteration

logger = logging.getLogger("offbeat")


class _Hook:
    """Calls a method while its owner exists. A copy of the hook does nothing."""

    def __init__(self, method: Callable[[], None]) -> None:
        self._method = weakref.WeakMethod(method)

    def __call__(self, module: nn.Module, keys: object) -> None:
        method = self._method()
        if method is not None:
            method()

    def __reduce__(self) -> tuple[Any, ...]:
        # Hooks are copied and pickled with their module. ``__exit__`` takes any arguments, returns
        # None, and can be unpickled without Offbeat.
        return getattr, (contextlib.nullcontext(), "__exit__")


class LoadDetection:
    """Detects values that are loaded into ``model`` or one of its modules, outside a consensus.

    Attributes:
        loaded: True if values were loaded and are not known to the strategy.
    """

    def __init__(self, model: nn.Module, worker: Worker, iteration: Iteration) -> None:
        self._worker, self._iteration = worker, iteration
        self.loaded = False
        self._hooks: list[RemovableHandle] = [
            module.register_load_state_dict_post_hook(_Hook(self._note))
            for module in model.modules()
            if not isinstance(module, torch.jit.ScriptModule)  # does not support this hook
        ]

    def _note(self) -> None:
        self.loaded = self.loaded or not self._iteration.shows_consensus

    def accept(self, what: str, *, finishing: bool = False) -> None:
        """Start the strategy again from loaded values. Sends nothing. ``what`` names the caller.

        The votes report a short checksum of the loaded model. If the values differ, workers raise a
        MismatchError. A difference that the checksum misses causes a warning in ``finish``. If
        ``finishing``, values loaded after a step cause only a warning.

        Raises:
            AttachError: a step was taken (unless ``finishing``), or the strategy cannot restart.
        """
        if not self.loaded:
            return
        worker = self._worker
        if not worker.step:
            self._iteration.flow.model_loaded()
            parameters = [p for _, p in worker.replica.parameters]
            worker.anchor = 1 + digest(parameters) % (ANCHORS - 1)
        else:
            text = (
                f"rank {worker.rank}: {what} after model.load_state_dict() on an attached model, "
                f"which has taken {worker.step} steps: the strategy does not know the loaded "
                "values. To evaluate them, load inside consensus() or after finish(); to train "
                "from them, use offbeat.load(), or detach() and attach again on all workers"
            )
            if not finishing:
                raise AttachError(text)
            logger.warning("%s", text)
        self.loaded = False

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
