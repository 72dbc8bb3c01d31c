"""Notes ``load_state_dict`` on an attached model.

A strategy may store the shared model, and would undo values that are loaded into the local model.
So the next step, consensus or state raises, and ``finish`` warns; see ``Iteration.loaded``.
"""

import contextlib
import weakref
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from offbeat.training.iteration import Iteration


class _Hook:
    """Sets ``loaded`` of an iteration, outside a consensus. A copy of the hook does nothing."""

    def __init__(self, iteration: Iteration) -> None:
        self._iteration = weakref.ref(iteration)

    def __call__(self, module: nn.Module, keys: object) -> None:
        iteration = self._iteration()
        if iteration is not None and not iteration.shows_consensus:
            iteration.loaded = True

    def __reduce__(self) -> tuple[Any, ...]:
        # Hooks are copied and pickled with their module. ``__exit__`` takes any arguments, returns
        # None, and can be unpickled without Offbeat.
        return getattr, (contextlib.nullcontext(), "__exit__")


class LoadHooks:
    """Notes values that are loaded into ``model`` or one of its modules, outside a consensus."""

    def __init__(self, model: nn.Module, iteration: Iteration) -> None:
        self._hooks: list[RemovableHandle] = [
            module.register_load_state_dict_post_hook(_Hook(iteration))
            for module in model.modules()
            if not isinstance(module, torch.jit.ScriptModule)  # does not support this hook
        ]

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
