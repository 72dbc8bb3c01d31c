"""Gradient hooks that report the end of each backward pass, and complete buckets while it runs.

A *bucket* is a group of parameters whose gradients are sent in one message. A reported bucket can
be sent while backward computes the next one.
"""

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from offbeat.errors import AttachError
from offbeat.nodes.shards import unsharded

_FORWARD_SHARE = 1 / 3  # of a pass's computation; the backward pass takes twice as long


class BackwardListener(Protocol):
    """Receives the reports of ``BackwardHooks``."""

    @property
    def accumulates(self) -> bool:
        """True if a backward pass that runs now only adds to the gradients. Nothing is reported."""

    def computed(self, progress: float) -> None:
        """Receive the progress of the step's computation, in (0, 1)."""

    def bucket_ready(self, bucket: int) -> None:
        """Receive the index of a complete bucket."""

    def backward_ended(self, received: set[int]) -> None:
        """Receive the indices of the optimizers with new gradients. Errors reach ``backward()``."""


class BackwardHooks:
    """Reports each backward pass to ``listener``.

    A bucket is reported once it and all earlier buckets are complete. The last bucket is not
    reported, because backward ends with it anyway.

    Args:
        parameters: The parameters of each optimizer.
        buckets: The buckets, in the order in which backward is expected to complete them. Empty:
            only the end of backward is reported.
        listener: Receives the reports.
    """

    def __init__(
        self,
        parameters: Sequence[Sequence[Tensor]],
        buckets: Sequence[Sequence[Tensor]],
        listener: BackwardListener,
    ) -> None:
        self._listener = listener
        elements = [sum(p.numel() for p in bucket) for bucket in buckets]
        self._bucket_of = {id(unsharded(p)): i for i, bucket in enumerate(buckets) for p in bucket}
        self._sizes = [len(bucket) for bucket in buckets]
        self._shares = [sum(elements[: i + 1]) / sum(elements) for i in range(len(elements))]
        self._accumulated_passes = 0  # of this step, in which nothing was reported
        self._task = -1  # torch's number of the newest backward pass
        self._running = False  # True from the first gradient of a pass until its end is reported
        self._received: set[int] = set()  # indices of optimizers with gradients of this pass
        self._missing: list[int] = []  # number of incomplete gradients in each bucket
        self._next = 0  # index of the next bucket to report
        self._hooks: list[RemovableHandle] = [
            unsharded(p).register_post_accumulate_grad_hook(self._hook_of(index))
            for index, group in enumerate(parameters)
            for p in group
        ]

    def _hook_of(self, optimizer: int) -> Callable[[Tensor], None]:
        reference = weakref.ref(self)  # a model that is dropped without detach() must be freed

        def accumulated(parameter: Tensor) -> None:
            hooks = reference()
            if hooks is not None:
                hooks._accumulated(parameter, optimizer)

        return accumulated

    def _accumulated(self, parameter: Tensor, optimizer: int) -> None:
        """Count an accumulation into ``parameter.grad``, and report the buckets it completes."""
        # A pass that failed does not report its end. Only this number shows that another has begun.
        # The public register_multi_grad_hook() would need a second hook on each parameter.
        task = torch._C._current_graph_task_id()
        begins = task != self._task and not _inside_backward_of_function()
        if self._listener.accumulates:
            if begins:
                self._task, self._accumulated_passes = task, self._accumulated_passes + 1
            return
        if begins:
            self._begin(task)
        self._received.add(optimizer)
        bucket = self._bucket_of.get(id(parameter))
        if bucket is None or not self._running:
            return
        if bucket < self._next:
            raise AttachError(
                "one backward pass computed a gradient twice, and had sent it after the first "
                "time: give torch.utils.checkpoint use_reentrant=False"
            )
        self._missing[bucket] -= 1
        while self._next < len(self._sizes) - 1 and self._missing[self._next] == 0:
            self._report()

    def _begin(self, task: int) -> None:
        if self._running:
            if self._next:
                raise AttachError(
                    "the previous backward pass failed after it had sent a part of its gradients: "
                    "detach() and attach again"
                )
            self._received.clear()
        self._task, self._running = task, True
        self._missing, self._next = list(self._sizes), 0
        # DDP and FSDP use this function, too: there is no public hook on the end of backward.
        queue_callback = torch.autograd.Variable._execution_engine.queue_callback
        # Callbacks run in the order in which they were queued. Queued again from a callback, this
        # one runs after those in which DDP and FSDP complete their gradients.
        queue_callback(lambda: queue_callback(self._ended))

    def _report(self) -> None:
        """Report the next bucket, and the progress before it."""
        # ``progress`` counts passes (one forward and one backward computation) and their fractions.
        passes = self._accumulated_passes
        progress = passes + _FORWARD_SHARE + (1 - _FORWARD_SHARE) * self._shares[self._next]
        self._listener.computed(progress / (passes + 1))
        self._listener.bucket_ready(self._next)
        self._next += 1

    def _ended(self) -> None:
        received, self._received = self._received, set()
        self._running, self._accumulated_passes, self._next = False, 0, 0
        self._listener.backward_ended(received)

    @property
    def unfinished(self) -> bool:
        """True if gradients were computed, but the end of their backward pass was not reported.

        This happens if all of them were computed by a custom function inside backward.
        """
        return bool(self._received) and not self._running

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


_BACKWARD = torch.autograd.backward.__code__
_APPLY: Any = torch.autograd.function.BackwardCFunction.apply.__code__


def _inside_backward_of_function() -> bool:
    """Return True if a custom function has started this backward pass inside its own backward.

    ``torch.utils.checkpoint(use_reentrant=True)`` does so. The end of such a pass is not the end of
    the training loop's pass, and torch does not tell them apart.
    """
    frame, nested = sys._getframe(), False
    while frame is not None:
        nested = nested or frame.f_code is _BACKWARD
        if nested and frame.f_code is _APPLY:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
