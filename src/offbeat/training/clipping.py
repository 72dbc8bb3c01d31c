"""Clipping of gradients, after the strategy has seen them.

``torch.nn.utils.clip_grad_norm_``, which training loops and frameworks call, sees the gradients of
this worker alone. A strategy that averages gradients, or measures them, must have them first: what
is clipped is then the mean. So torch's functions are replaced while a model is attached, and do the
same as ``Synchronizer.clip_grad_norm_``.
"""

import sys
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from offbeat.averaging import AttachedOptimizer, Worker
from offbeat.nodes.shards import Shard
from offbeat.training.iteration import Iteration

_NAMES = ("clip_grad_norm_", "clip_grad_value_")


class Clipping:
    """Prepares an iteration before its gradients are clipped, also by torch's functions.

    A training loop may skip a step after a clip, because of its norm for example. The next step
    then finds other gradients, and the iteration counts as skipped.

    Args:
        iteration: The iterations of the worker.
        worker: The worker.
    """

    def __init__(self, iteration: Iteration, worker: Worker) -> None:
        self._iteration, self._worker = iteration, worker
        self._kept: dict[int, tuple[nn.Parameter, Tensor, int]] = {}  # after a clip, by optimizer
        self._warned = False
        self._end: Callable[[], object] | None = None
        if iteration.flow.uses_gradients or iteration.node is not None:
            self.watch()

    def watch(self) -> None:
        """Also prepare the iteration when torch's functions clip."""
        if self._end is not None:
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
        self._end = finalizer

    def remove(self) -> None:
        """Restore torch's functions."""
        if self._end is not None:
            self._end()

    def prepare(self, index: int) -> None:
        """The gradients of optimizer ``index`` are ready, and about to be clipped or used."""
        kept = self._kept.get(index)
        if kept is not None and not self._iteration.awaits_step(index):
            del self._kept[index]  # a GradScaler has skipped that step
        elif kept is not None and kept[0].grad is not kept[1]:
            del self._kept[index]
            self._iteration.complete(index, skipped=True)
        elif kept is not None and kept[1]._version != kept[2] and self._end is not None:
            self._warn(
                "gradients were changed between a clip and optimizer.step(), after the strategy "
                "has seen them: clip once, just before the step"
            )
        self._iteration.prepare(index)

    def step(self, index: int) -> None:
        """Optimizer ``index`` is about to step."""
        self.prepare(index)
        self._kept.pop(index, None)

    def clip(self, optimizers: Sequence[AttachedOptimizer], max_norm: float) -> Tensor:
        """Scale the gradients of ``optimizers`` together; returns their norm before."""
        for one in optimizers:
            self.prepare(one.index)
        worker = self._worker
        squared = worker.norm_squared
        if squared is None or len(optimizers) < len(worker.optimizers):
            squared = worker.squared_norm(g for one in optimizers for g in one.gradients())
        parameters = [p for one in optimizers for p in one.parameters if p.grad is not None]
        double = any(p.dtype in (torch.float64, torch.complex128) for p in parameters)
        norm = torch.tensor(squared, dtype=torch.float64).sqrt()
        norm = norm if double else norm.float()
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        for one in optimizers:
            self.clipped(one.index)
        return norm

    def clipped(self, index: int) -> None:
        """Remember the gradients of optimizer ``index`` as they are now, by the smallest."""
        self._worker.norm_squared = None  # it was the norm before
        there = [p for p in self._worker.optimizers[index].parameters if p.grad is not None]
        if there and self._iteration.awaits_step(index):
            smallest = min(there, key=lambda p: p.numel())
            gradient = smallest.grad
            assert gradient is not None
            self._kept[index] = (smallest, gradient, gradient._version)

    def by_torch(self, indices: Sequence[int]) -> bool:
        """Torch is about to clip the gradients of these optimizers. Returns True if prepared."""
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


# -- torch's functions, replaced while a model is attached -----------------------------------------

_watched: "dict[int, tuple[weakref.ref[Clipping], int]]" = {}  # by parameter
_replaced: list[tuple[dict[str, Any], str, Callable[..., Any], Callable[..., Any]]] = []


def _watch(owners: "dict[int, tuple[weakref.ref[Clipping], int]]") -> None:
    _watched.update(owners)
    if _replaced:
        return
    for name in _NAMES:
        original: Callable[..., Any] = getattr(nn.utils, name)
        watching = _watching(original)
        for module in list(sys.modules.values()):  # modules that have imported it by name
            names = getattr(module, "__dict__", {})
            if isinstance(names, dict) and names.get(name) is original:
                _replaced.append((names, name, original, watching))
                names[name] = watching


def _stop_watching(clipping: "weakref.ref[Clipping]", parameters: Sequence[int]) -> None:
    """Called by the garbage collector, so at any time, even inside itself."""
    for key in parameters:
        watched = _watched.get(key)
        if watched is not None and watched[0] is clipping:
            _watched.pop(key, None)
    if _watched:
        return
    while _replaced:
        names, name, original, watching = _replaced.pop()
        if names.get(name) is watching:
            names[name] = original


def _watching(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        owners: dict[int, tuple[Clipping, set[int]]] = {}
        for parameter in given:
            if id(parameter) in _watched:
                reference, index = _watched[id(parameter)]
                clipping = reference()
                if clipping is not None:
                    owners.setdefault(id(clipping), (clipping, set()))[1].add(index)
        prepared = [(c, i) for c, i in owners.values() if c.by_torch(sorted(i))]
        result = original(given, *args, **kwargs)
        for clipping, indices in prepared:
            for index in indices:
                clipping.clipped(index)
        return result

    return clip
