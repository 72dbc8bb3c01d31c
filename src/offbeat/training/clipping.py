"""Gradient clipping on an attached model.

A strategy that averages or measures gradients must receive them before they are clipped. If it
averages them, the mean over the workers is clipped, not each worker's gradient.

Training loops and frameworks call ``torch.nn.utils.clip_grad_norm_`` or ``clip_grad_value_``, which
know nothing about the strategy. Both functions are therefore replaced while gradients are measured
or averaged, by the strategy or inside a node (a group of workers that acts as one). A replacement
passes the gradients to the strategy and then calls torch's function. If one call clips the
gradients of several optimizers, the replacement only clips, and warns once.
"""

import sys
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offbeat.averaging import AttachedOptimizer, Worker
from offbeat.errors import AttachError
from offbeat.nodes.shards import Shard
from offbeat.training.iteration import Iteration
from offbeat.training.optimizers import unwrapped_optimizer

_NAMES = ("clip_grad_norm_", "clip_grad_value_")


class _Clipped(NamedTuple):
    """The gradient tensor with the fewest elements, and its ``_version``, directly after a clip.

    If the parameter has another gradient tensor later, the training loop has skipped the step. If
    only the version differs, the gradient was changed after the clip.
    """

    parameter: nn.Parameter
    gradient: Tensor
    version: int


class Clipping:
    """Passes gradients to the strategy before ``clip`` or torch's functions clip them.

    A training loop may clip and then skip the step, for example because the norm is too large. The
    next call of ``prepare`` then finds new gradient tensors (after ``zero_grad(set_to_none=True)``)
    and counts the skipped step.
    """

    def __init__(self, iteration: Iteration, worker: Worker) -> None:
        self._iteration, self._worker = iteration, worker
        self._clipped: dict[int, _Clipped] = {}  # by index of the optimizer, until its step
        self._warned = False
        self._unwatch: Callable[[], object] | None = None
        if iteration.flow.uses_gradients or iteration.node is not None:
            self._replace_torch_functions()

    def _replace_torch_functions(self) -> None:
        me = weakref.ref(self)  # a model that is dropped without detach() must be freed
        owners = {
            id(p.parameter if isinstance(p, Shard) else p): (me, each.index)
            for each in self._worker.optimizers
            for p in each.parameters
        }
        _watch(owners)
        finalizer = weakref.finalize(self, _stop_watching, me, tuple(owners))
        finalizer.atexit = False
        self._unwatch = finalizer

    def remove(self) -> None:
        """Restore torch's functions, unless another attached model needs the replacements."""
        if self._unwatch is not None:
            self._unwatch()

    def prepare(self, index: int) -> None:
        """Pass the gradients of optimizer ``index`` to the strategy, before a clip or a step."""
        clipped = self._clipped.get(index)
        if clipped is not None:
            parameter, gradient, version = clipped
            if not self._iteration.is_prepared(index):  # ScalerHooks has counted a skipped step
                del self._clipped[index]
            elif parameter.grad is not gradient:  # the training loop skipped the step
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

    def clip(self, max_norm: float, optimizer: Optimizer | None) -> Tensor:
        """Implement ``Synchronizer.clip_grad_norm_``."""
        optimizers = self._chosen(optimizer)
        for each in optimizers:
            self.prepare(each.index)
        worker = self._worker
        squared = worker.norm_squared
        if squared is None or len(optimizers) < len(worker.optimizers):
            squared = worker.squared_norm(g for each in optimizers for g in each.gradients())
        parameters = [p for each in optimizers for p in each.parameters if p.grad is not None]
        double = any(p.dtype in (torch.float64, torch.complex128) for p in parameters)
        norm = torch.tensor(squared, dtype=torch.float64, device="cpu").sqrt()
        norm = norm if double else norm.float()
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        for each in optimizers:
            self.clipped(each.index)
        return norm

    def _chosen(self, optimizer: Optimizer | None) -> Sequence[AttachedOptimizer]:
        if optimizer is not None:
            index = self._iteration.index_of(unwrapped_optimizer(optimizer))
            if index is None:
                raise AttachError("clip_grad_norm_() was given an optimizer that is not attached")
            return [self._worker.optimizers[index]]
        if self._iteration.partly_stepped:
            raise AttachError(
                "one optimizer has already stepped in this iteration, so its gradients are used: "
                "call clip_grad_norm_(max_norm, optimizer) with the one that is about to step"
            )
        return self._worker.optimizers

    def clipped(self, index: int) -> None:
        """Record that the gradients of optimizer ``index`` were clipped."""
        self._worker.norm_squared = None  # it was measured before the clip
        with_gradient = [p for p in self._worker.optimizers[index].parameters if p.grad is not None]
        if with_gradient and self._iteration.is_prepared(index):
            smallest = min(with_gradient, key=lambda p: p.numel())
            assert smallest.grad is not None
            self._clipped[index] = _Clipped(smallest, smallest.grad, smallest.grad._version)

    def before_torch_clip(self, indices: Sequence[int]) -> bool:
        """Call ``prepare`` before torch clips gradients of the optimizers ``indices``.

        Returns True if the caller must call ``clipped`` after the clip. Returns False without a
        call of ``prepare`` after the end of training, while the model holds the mean of all workers
        (inside ``Synchronizer.consensus``), and for several optimizers at once.
        """
        if not self._iteration.active or self._iteration.shows_consensus:
            return False
        if len(indices) > 1:  # too early for ``prepare`` if one still waits for a backward pass
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

# Maps the id of each attached parameter to its ``Clipping`` and the index of its optimizer.
_owners: "dict[int, tuple[weakref.ref[Clipping], int]]" = {}
# Each replaced function: namespace of the module, name, original function, replacement.
_replaced: list[tuple[dict[str, Any], str, Callable[..., Any], Callable[..., Any]]] = []


def _watch(owners: "dict[int, tuple[weakref.ref[Clipping], int]]") -> None:
    _owners.update(owners)
    if _replaced:
        return
    for name in _NAMES:
        original: Callable[..., Any] = getattr(nn.utils, name)
        replacement = _preparing(original)
        for module in list(sys.modules.values()):  # any module may have imported the function
            names = getattr(module, "__dict__", {})
            if isinstance(names, dict) and names.get(name) is original:
                _replaced.append((names, name, original, replacement))
                names[name] = replacement


def _stop_watching(clipping: "weakref.ref[Clipping]", parameters: Sequence[int]) -> None:
    """Forget the parameters of ``clipping``. If no other model is left, restore torch's functions.

    The garbage collector may call this function at any time, also in the middle of another call.
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
    """Return a function that passes gradients to the strategy and then calls ``original``."""

    @wraps(original)
    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        concerned: dict[int, tuple[Clipping, set[int]]] = {}
        for parameter in tensors:
            if id(parameter) in _owners:
                reference, index = _owners[id(parameter)]
                clipping = reference()
                if clipping is not None:
                    concerned.setdefault(id(clipping), (clipping, set()))[1].add(index)
        prepared = [(c, i) for c, i in concerned.values() if c.before_torch_clip(sorted(i))]
        result = original(tensors, *args, **kwargs)
        for clipping, indices in prepared:
            for index in indices:
                clipping.clipped(index)
        return result

    return clip
