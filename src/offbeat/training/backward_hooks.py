"""Hooks on gradients: report buckets that are complete while backward still runs."""

from collections.abc import Callable

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from offbeat.averaging import AttachedOptimizer
from offbeat.transport.costs import FORWARD_SHARE
from offbeat.transport.host import Host


class BackwardHooks:
    """Reports the buckets of one optimizer's gradients in order, as backward completes them.

    With gradient accumulation, a step has several backward passes, and a bucket is complete in the
    last one. The number of passes is taken from the step before. If a step has more passes than
    that, a bucket is reported too early: the receiver must detect that the gradients have changed.

    Args:
        optimizer: The optimizer and its parameters.
        host: Receives the progress of the step's computation, for virtual time.
        ready: Called with the index of each bucket except the last. It returns False if no further
            bucket should be reported.
    """

    def __init__(
        self, optimizer: AttachedOptimizer, host: Host, ready: Callable[[int], bool]
    ) -> None:
        self._host, self._ready = host, ready
        self._bucket_of = {id(p): i for i, bucket in enumerate(optimizer.buckets) for p in bucket}
        self._sizes = [len(bucket) for bucket in optimizer.buckets]
        elements = [sum(p.numel() for p in bucket) for bucket in optimizer.buckets]
        total = sum(elements)
        self._shares = [sum(elements[: i + 1]) / total for i in range(len(elements))]
        self._passes = 1  # expected backward passes per step
        self._begin_step()
        self._hooks: list[RemovableHandle] = [
            p.register_post_accumulate_grad_hook(self._accumulated)
            for bucket in optimizer.buckets
            for p in bucket
        ]

    def _begin_step(self) -> None:
        self._counts: dict[int, int] = {}  # accumulations of each gradient in this step
        self._missing = list(self._sizes)  # incomplete gradients of each bucket
        self._next = 0  # first bucket that was not reported

    def _accumulated(self, parameter: Tensor) -> None:
        """Count an accumulation into ``parameter.grad``, and report the buckets it completes."""
        key = id(parameter)
        count = self._counts[key] = self._counts.get(key, 0) + 1
        if count != self._passes or not self._hooks:
            return
        self._missing[self._bucket_of[key]] -= 1
        while self._next < len(self._sizes) - 1 and self._missing[self._next] == 0:
            if not self._report():
                return

    def _report(self) -> bool:
        """Report the next bucket. Returns True if further buckets should be reported."""
        before = self._passes - 1 + FORWARD_SHARE
        now = before + (1 - FORWARD_SHARE) * self._shares[self._next]
        self._host.computed(now / self._passes)
        wanted = self._ready(self._next)
        self._next += 1
        if not wanted:
            self.close()
        return wanted

    def report_all(self) -> None:
        """Report all buckets except the last, for a model without autograd."""
        while self._hooks and self._next < len(self._sizes) - 1:
            self._report()

    def end_step(self) -> None:
        """End the step: its gradients are used, and the next backward belongs to another step."""
        if self._counts:
            self._passes = max(self._counts.values())
        self._begin_step()

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
