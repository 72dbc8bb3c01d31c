"""Clipping of gradients: after the strategy has had them, whoever clips.

``torch.nn.utils.clip_grad_norm_``, which frameworks call, sees this worker's gradients alone. Where
a strategy averages gradients or looks at them, it has them first: what is clipped is then the mean.
"""

import sys
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from offbeat.strategies.base import Part, Strategy, Worker
from offbeat.training.iteration import Iteration
from offbeat.training.shards import Shard

_NAMES = ("clip_grad_norm_", "clip_grad_value_")


class Clipping:
    """Prepares an iteration before its gradients are clipped, by torch's functions, too.

    A step may be left out after a clip, because of its norm for example. Then the gradients are
    others when the next one comes, and the iteration counts as one that was skipped.

    Args:
        iteration: Where the worker stands.
        strategy: What it runs.
        worker: The worker.
        max_norm: Clip each optimizer's gradients to that before its step; None does not.
    """

    def __init__(
        self, iteration: Iteration, strategy: Strategy, worker: Worker, max_norm: float | None
    ) -> None:
        self._iteration, self._worker, self._max_norm = iteration, worker, max_norm
        self._kept: dict[int, tuple[nn.Parameter, Tensor, int]] = {}  # after a clip, by optimizer
        self._warned = False
        looks = type(strategy).gradients is not Strategy.gradients or iteration.change is not None
        inside = iteration.node is not None
        self._matters = looks or inside or strategy.rounds == "gradients"
        self._end: Callable[[], object] = lambda: None
        if self._matters:
            me = weakref.ref(self)  # who drops a model without detaching it shall be rid of it
            owners = {
                id(p.whole if isinstance(p, Shard) else p): (me, part.index)
                for part in worker.parts
                for p in part.parameters
            }
            _watch(owners)
            finalizer = weakref.finalize(self, _watch_no_more, me, tuple(owners))
            finalizer.atexit = False
            self._end = finalizer

    def remove(self) -> None:
        """Let torch's functions alone."""
        self._end()

    def prepare(self, index: int) -> None:
        """The gradients of optimizer ``index`` are ready, and about to be clipped or used."""
        kept = self._kept.get(index)
        if kept is not None and not self._iteration.awaits_step(index):
            del self._kept[index]  # a GradScaler has skipped that step
        elif kept is not None and kept[0].grad is not kept[1]:
            del self._kept[index]
            self._iteration.complete(index, skipped=True)
        elif kept is not None and kept[1]._version != kept[2] and self._matters:
            self._warn(
                "gradients were changed between a clip and optimizer.step(), after the strategy "
                "has had them: clip once, just before the step"
            )
        self._iteration.prepare(index)

    def step(self, index: int) -> None:
        """Optimizer ``index`` is about to step."""
        self.prepare(index)
        if self._max_norm is not None and self._iteration.active:
            self.clip(self._worker.parts[index : index + 1], self._max_norm)
        self._kept.pop(index, None)

    def clip(self, parts: Sequence[Part], max_norm: float) -> Tensor:
        """Scale the gradients of ``parts`` to ``max_norm`` together; returns their norm before."""
        for part in parts:
            self.prepare(part.index)
        worker = self._worker
        squared = worker.norm_squared
        if squared is None or len(parts) < len(worker.parts):
            squared = worker.squared_norm(g for part in parts for g in part.gradients())
        parameters = [p for part in parts for p in part.parameters if p.grad is not None]
        double = any(p.dtype in (torch.float64, torch.complex128) for p in parameters)
        norm = torch.tensor(squared, dtype=torch.float64).sqrt()
        norm = norm if double else norm.float()
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        for part in parts:
            self.clipped(part.index)
        return norm

    def clipped(self, index: int) -> None:
        """Remember the gradients of optimizer ``index`` as they are now, by the smallest."""
        self._worker.norm_squared = None  # it was that of before
        there = [p for p in self._worker.parts[index].parameters if p.grad is not None]
        if there and self._iteration.awaits_step(index):
            smallest = min(there, key=lambda p: p.numel())
            gradient = smallest.grad
            assert gradient is not None
            self._kept[index] = (smallest, gradient, gradient._version)

    def by_torch(self, indices: Sequence[int]) -> bool:
        """Torch is about to clip gradients of these optimizers; whether they were prepared."""
        if not self._iteration.active or self._iteration.shows_consensus:
            return False
        if len(indices) > 1:  # those of the others may not be ready
            self._warn(
                "torch.nn.utils clips the gradients of several optimizers at once, before the "
                "strategy has had them: use sync.clip_grad_norm_, or attach(max_grad_norm=...)"
            )
            return False
        self.prepare(indices[0])
        return True

    def _warn(self, message: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(message, stacklevel=2)


# -- torch's functions, replaced while anything is watched -----------------------------------------

_watched: "dict[int, tuple[weakref.ref[Clipping], int]]" = {}  # by parameter
_replaced: list[tuple[dict[str, Any], str, Callable[..., Any], Callable[..., Any]]] = []


def _watch(owners: "dict[int, tuple[weakref.ref[Clipping], int]]") -> None:
    _watched.update(owners)
    if _replaced:
        return
    for name in _NAMES:
        original: Callable[..., Any] = getattr(nn.utils, name)
        watching = _watching(original)
        for module in list(sys.modules.values()):  # whoever has imported it has a name for it
            names = getattr(module, "__dict__", {})
            if isinstance(names, dict) and names.get(name) is original:
                _replaced.append((names, name, original, watching))
                names[name] = watching


def _watch_no_more(clipping: "weakref.ref[Clipping]", parameters: Sequence[int]) -> None:
    """May run at any time, within itself, too: the collector calls it."""
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
