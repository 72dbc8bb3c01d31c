"""Gradient hooks that report complete buckets of gradients while backward still runs.

A *bucket* is a group of parameters whose gradients are sent in one message. A reported bucket can
be sent while backward computes the next one.
"""

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from offbeat.transport.host import Host

_FORWARD_SHARE = 1 / 3  # of a step's computation; the backward pass takes twice as long


class BackwardHooks:
    """Reports each bucket once it and all earlier buckets are complete.

    The last bucket is not reported, because backward ends with it anyway.

    With gradient accumulation a step has several backward passes, and a bucket is complete during
    the last one. The hooks expect as many passes as in the last step that had any; at first, 1.
    If a step has more passes, buckets are reported too early. The receiver must therefore detect
    gradients that change after the report. If a step has fewer passes, no bucket is reported.

    Args:
        buckets: The buckets, in the order in which backward is expected to complete them.
        host: Receives the progress of each step's computation, which only a simulation uses.
        ready: Called with the index of each complete bucket. If it returns False, all hooks are
            removed.
    """

    def __init__(
        self,
        buckets: Sequence[Sequence[Tensor]],
        host: Host,
        ready: Callable[[int], bool],
    ) -> None:
        self._host, self._ready = host, ready
        elements = [sum(p.numel() for p in bucket) for bucket in buckets]
        self._bucket_of = {id(p): i for i, bucket in enumerate(buckets) for p in bucket}
        self._sizes = [len(bucket) for bucket in buckets]
        total = sum(elements)
        self._shares = [sum(elements[: i + 1]) / total for i in range(len(elements))]
        self._passes = 1  # expected number of backward passes in a step
        self._begin_step()
        self._hooks: list[RemovableHandle] = [
            p.register_post_accumulate_grad_hook(self._accumulated)
            for bucket in buckets[:-1]
            for p in bucket
        ]

    def _begin_step(self) -> None:
        self._counts: dict[int, int] = {}  # number of accumulations into each gradient
        self._missing = list(self._sizes)  # number of incomplete gradients in each bucket
        self._next = 0  # index of the next bucket to report

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
        """Report the next bucket. Returns False if the hooks were removed."""
        # ``progress`` counts passes (one forward and one backward computation) and their fractions.
        before_backward = self._passes - 1 + _FORWARD_SHARE
        progress = before_backward + (1 - _FORWARD_SHARE) * self._shares[self._next]
        self._host.computed(progress / self._passes)
        continues = self._ready(self._next)
        self._next += 1
        if not continues:
            self.close()
        return continues

    def end_step(self) -> None:
        """End the current step. The next backward pass belongs to the next step."""
        if self._counts:
            self._passes = max(self._counts.values())
        self._begin_step()

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
