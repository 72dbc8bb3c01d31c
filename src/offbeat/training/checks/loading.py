"""Refuses ``load_state_dict`` on an attached model, except inside ``consensus()``.

A strategy may store the global model. It would overwrite values loaded into the local model.
Frozen modules can be loaded, for example the target network of a DQN.
"""

import contextlib
import weakref
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from offbeat.training.iteration import Iteration


class _Hook:
    """Raises AttachError unless the model may be replaced. A copy of the hook does nothing."""

    def __init__(self, iteration: Iteration) -> None:
        self._iteration = weakref.ref(iteration)

    def __call__(self, *_: object) -> None:
        iteration = self._iteration()
        if iteration is not None:
            iteration.require_replaceable()

    def __reduce__(self) -> tuple[Any, ...]:
        # Modules are copied and pickled with their hooks. This hook becomes ``__exit__`` of a
        # ``nullcontext``, which accepts any arguments, does nothing, and needs no Offbeat to load.
        return getattr, (contextlib.nullcontext(), "__exit__")


def refuse_loading(model: nn.Module, iteration: Iteration, undo: ExitStack) -> None:
    """Make ``load_state_dict`` of ``model`` and its modules raise before it changes any value.

    Loading is allowed again once ``undo`` is closed.
    """
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):  # does not support this hook
            continue
        if any(parameter.requires_grad for parameter in module.parameters()):
            undo.callback(module.register_load_state_dict_pre_hook(_Hook(iteration)).remove)
