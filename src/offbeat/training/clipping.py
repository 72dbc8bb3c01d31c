"""Gradient clipping on an attached model.

A strategy that averages or measures gradients must receive them before they are clipped, so that
the mean is clipped and not each worker's gradient. Training loops and frameworks clip with
``torch.nn.utils.clip_grad_norm_``, which sees the local gradients only. While such a model is
attached, torch's functions are therefore replaced by versions that pass the gradients to the
strategy first, as ``Synchronizer.clip_grad_norm_`` does.
"""

import sys
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from offbeat.averaging import AttachedOptimizer, Worker
from offbeat.nodes.shards import Shard
from offbeat.training.iteration import Iteration

_NAMES = ("clip_grad_norm_", "clip_grad_value_")


class _Clipped(NamedTuple):
    """The smallest gradient of an optimizer as it was after a clip.

    It shows whether the loop has used, replaced or changed the clipped gradients since.
    """

    parameter: nn.Parameter
    gradient: Tensor
    version: int


class Clipping:
    """Passes gradients to the strategy before they are clipped, also by torch's functions.

    A training loop may clip and then skip the step, for example because the norm is too large. The
    next step then finds other gradients, and the skipped step counts as an iteration.

    Args:
        iteration: The iterations of the worker.
        worker: The worker.
    """

    def __init__(self, iteration: Iteration, worker: Worker) -> None:
        self._iteration, self._worker = iteration, worker
        self._clipped: dict[int, _Clipped] = {}  # by optimizer, until its step
        self._warned = False
        self._unwatch: Callable[[], object] | None = None
        if iteration.flow.uses_gradients or iteration.node is not None:
            self.watch()

    def watch(self) -> None:
        """Replace torch's functions by versions that prepare the iteration first."""
        if self._unwatch is not None:
            return
        me = weakref.ref(self)  # a model that is dropped without detach() must be freed
        owners = {
            id(p.parameter if isinstance(p, Shard) else p): (me, one.index)
            for one in self._worker.optimizers
            for p in one.parameters
        }
        _watch(owners)
        finalizer = weakref.finalize(self, _stop_watching, me, tuple(owners))
        finalizer.atexit = False
        self._unwatch = finalizer

    def remove(self) -> None:
        """Restore torch's functions."""
        if self._unwatch is not None:
            self._unwatch()

    def prepare(self, index: int) -> None:
        """Pass the gradients of optimizer ``index`` to the strategy, before a clip or a step."""
        clipped = self._clipped.get(index)
        if clipped is not None:
            parameter, gradient, version = clipped
            if not self._iteration.is_prepared(index):  # a GradScaler has skipped the step
                del self._clipped[index]
            elif parameter.grad is not gradient:  # the loop has skipped the step
                del self._clipped[index]
                self._iteration.complete(index, skipped=True)
            elif gradient._version != version and self._unwatch is not None:
                self._warn(
                    "gradients were changed between a clip and optimizer.step(), after the "
                    "strategy has seen them: clip once, just before the step"
                )
        self._iteration.prepare(index)

    def before_step(self, index: int) -> None:
        """Pass the gradients to the strategy: optimizer ``index`` is about to step."""
        self.prepare(index)
        self._clipped.pop(index, None)

    def clip(self, optimizers: Sequence[AttachedOptimizer], max_norm: float) -> Tensor:
        """Clip the gradients of ``optimizers`` by their total norm. Returns the norm before."""
        for each in optimizers:
            self.prepare(each.index)
        worker = self._worker
        squared = worker.norm_squared
        if squared is None or len(optimizers) < len(worker.optimizers):
            squared = worker.squared_norm(g for each in optimizers for g in each.gradients())
        parameters = [p for each in optimizers for p in each.parameters if p.grad is not None]
        double = any(p.dtype in (torch.float64, torch.complex128) for p in parameters)
        norm = torch.tensor(squared, dtype=torch.float64).sqrt()
        norm = norm if double else norm.float()
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        for each in optimizers:
            self.clipped(each.index)
        return norm

    def clipped(self, index: int) -> None:
        """Note that the gradients of optimizer ``index`` were clipped."""
        self._worker.norm_squared = None  # the norm before the clip
        with_gradient = [p for p in self._worker.optimizers[index].parameters if p.grad is not None]
        if with_gradient and self._iteration.is_prepared(index):
            smallest = min(with_gradient, key=lambda p: p.numel())
            assert smallest.grad is not None
            self._clipped[index] = _Clipped(smallest, smallest.grad, smallest.grad._version)

    def before_torch(self, indices: Sequence[int]) -> bool:
        """Prepare the optimizers ``indices`` before torch's function clips their gradients.

        Returns:
            True if they were prepared. The caller then reports the clip to ``clipped``.
        """
        if not self._iteration.active or self._iteration.shows_consensus:
            return False
        if len(indices) > 1:  # the gradients of the others may not be ready
            self._warn(
                "torch.nn.utils clips the gradients of several optimizers at once, before the "
                "strategy has seen them: use sync.clip_grad_norm_"
            )
            return False
        self.prepare(indices[0])
        return True

    def _warn(self, message: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(message, stacklevel=2)


# -- replacement of torch's functions --------------------------------------------------------------

# Owner of each parameter of the attached models: its clipping and the index of its optimizer.
_owners: "dict[int, tuple[weakref.ref[Clipping], int]]" = {}
# Replaced names: namespace, name, original function, replacement.
_replaced: list[tuple[dict[str, Any], str, Callable[..., Any], Callable[..., Any]]] = []


def _watch(owners: "dict[int, tuple[weakref.ref[Clipping], int]]") -> None:
    _owners.update(owners)
    if _replaced:
        return
    for name in _NAMES:
        original: Callable[..., Any] = getattr(nn.utils, name)
        replacement = _preparing(original)
        for module in list(sys.modules.values()):  # modules may have imported it by name
            names = getattr(module, "__dict__", {})
            if isinstance(names, dict) and names.get(name) is original:
                _replaced.append((names, name, original, replacement))
                names[name] = replacement


def _stop_watching(clipping: "weakref.ref[Clipping]", parameters: Sequence[int]) -> None:
    """Remove the owner ``clipping``, and restore torch's functions if it was the last.

    The garbage collector may call it at any time, even during another call of it.
    """
    for key in parameters:
        owner = _owners.get(key)
        if owner is not None and owner[0] is clipping:
            _owners.pop(key, None)
    if _owners:
        return
    while _replaced:
        names, name, original, replacement = _replaced.pop()
        if names.get(name) is replacement:
            names[name] = original


def _preparing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``original`` with a preparation of the attached optimizers before it."""

    @wraps(original)
    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        concerned: dict[int, tuple[Clipping, set[int]]] = {}
        for parameter in given:
            if id(parameter) in _owners:
                reference, index = _owners[id(parameter)]
                clipping = reference()
                if clipping is not None:
                    concerned.setdefault(id(clipping), (clipping, set()))[1].add(index)
        prepared = [(c, i) for c, i in concerned.values() if c.before_torch(sorted(i))]
        result = original(given, *args, **kwargs)
        for clipping, indices in prepared:
            for index in indices:
                clipping.clipped(index)
        return result

    return clip
