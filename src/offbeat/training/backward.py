"""Backward, watched: which buckets of gradients are complete while it still runs."""

from collections.abc import Callable

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from offbeat.averaging import AttachedOptimizer
from offbeat.transport.costs import FORWARD_SHARE
from offbeat.transport.host import Host


class Backward:
    """Hooks on the gradients of one optimizer, which tell of its buckets in order.

    With gradient accumulation there are several backward passes in a step; how many is learned from
    the step before, and buckets are told of in the last one. A bucket is told of too early when
    there are more passes than that: who acts on it must notice.

    Args:
        optimizer: The optimizer and its parameters.
        host: Told how far the step's computing has come, so that virtual time can show what
            happens while backward runs.
        ready: Called with the number of each bucket but the last; false ends the watch.
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
        self._passes = 1
        self._hooks: list[RemovableHandle] = []
        self._begin()
        self._hooks = [
            p.register_post_accumulate_grad_hook(self._accumulated)
            for bucket in optimizer.buckets
            for p in bucket
        ]

    def _begin(self) -> None:
        self._seen: dict[int, int] = {}  # how often each gradient was added to
        self._missing = list(self._sizes)  # gradients, by bucket
        self._next = 0

    def _accumulated(self, parameter: Tensor) -> None:
        """Autograd has added to ``parameter.grad``."""
        key = id(parameter)
        seen = self._seen[key] = self._seen.get(key, 0) + 1
        if seen != self._passes or not self._hooks:
            return
        self._missing[self._bucket_of[key]] -= 1
        while self._next < len(self._sizes) - 1 and self._missing[self._next] == 0:
            if not self._complete():
                return

    def _complete(self) -> bool:
        """Report the next bucket. Returns whether to report further ones."""
        before = self._passes - 1 + FORWARD_SHARE
        now = before + (1 - FORWARD_SHARE) * self._shares[self._next]
        self._host.computed(now / self._passes)
        goes_on = self._ready(self._next)
        self._next += 1
        if not goes_on:
            self.close()
        return goes_on

    def play(self) -> None:
        """Report all buckets but the last, as one backward pass would: for a model without one."""
        while self._hooks and self._next < len(self._sizes) - 1:
            self._complete()

    def end_step(self) -> None:
        """The gradients are used: the next backward belongs to another step."""
        if self._seen:
            self._passes = max(self._seen.values())
        self._begin()

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
