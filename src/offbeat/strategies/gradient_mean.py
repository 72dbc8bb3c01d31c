"""The mean of gradients over the workers, in buckets, optionally overlapped with backward.

Buckets follow the reverse order of the parameters, in which backward fills them. All but the last
may start while backward still runs; the last one starts when the optimizer is about to step. Just
before it leaves what the workers must agree on: their roll, whether a gradient changed after its
bucket had left (accumulation, clipping, unscaling), and which parameters have a gradient. So the
first means are put in place while the last bucket is under way. A single bucket carries these
numbers in its tail, unless the wire is lossy: they travel exactly.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from offbeat.fabric import Communicator, Completed, Handle, Wire
from offbeat.replica import BUCKET_BYTES, Bucket, group_tensors, pack, unpack

_FIRST_BUCKET_BYTES = 2**20  # small, so that the network gets to work early in backward
_STRIKES = 2  # windows in a row that may start too early before the overlap is given up


class _GradientBucket(Bucket):
    """A bucket that stages the gradients of its parameters; a missing one counts as zero."""

    def __init__(self, parameters: Sequence[nn.Parameter], tail: int, stream: str) -> None:
        super().__init__(parameters, tail)
        self.stream = stream
        self.parameters = list(parameters)
        self.waiting = 0  # parameters whose gradient has not come yet
        self.handle: Handle[Tensor] = Completed(torch.empty(0))
        self._versions: list[tuple[int, int] | None] = []
        self._sample: tuple[nn.Parameter, Tensor] | None = None

    def pack(self, weight: float = 1.0) -> Tensor:
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self.parameters]
        pack([g.to_dense() if g.is_sparse else g for g in gradients], self.body, weight)
        return self.flat

    def remember(self) -> None:
        """Note what the gradients are now, to see later whether they changed."""
        self._versions = [_version(p) for p in self.parameters]
        smallest = min(self.parameters, key=lambda p: p.numel())
        self._sample = None
        if smallest.grad is not None:
            self._sample = (smallest, smallest.grad.detach().clone())

    def changed(self) -> bool:
        """Whether a gradient is another one than when ``remember`` was called.

        The sample finds changes that bypass the version counter, as ``GradScaler.unscale_`` does.
        """
        if self._versions != [_version(p) for p in self.parameters]:
            return True
        if self._sample is None:
            return False
        parameter, value = self._sample
        gradient = parameter.grad
        # NaN differs from itself: an overflow counts as a change, which costs a second round only
        return gradient is None or not torch.equal(gradient.detach(), value)

    def wait(self) -> None:
        """Wait until the sum over the workers has arrived."""
        self.handle.wait()

    def distribute(self, divisor: float, present: list[bool]) -> None:
        """Write the mean into the gradients; a gradient nobody has stays None."""
        targets: list[Tensor] = []
        for parameter, somewhere in zip(self.parameters, present, strict=True):
            gradient = parameter.grad
            if gradient is None or gradient.is_sparse:
                if somewhere:
                    parameter.grad = gradient = torch.zeros_like(parameter)
                else:
                    gradient = torch.empty_like(parameter)  # a place to unpack into, dropped
            targets.append(gradient)
        unpack(self.body, targets, divisor)


def _version(parameter: nn.Parameter) -> tuple[int, int] | None:
    gradient = parameter.grad
    return None if gradient is None else (id(gradient), gradient._version)


class GradientMean:
    """g ← Σ g / (number of contributing workers), for the parameters of one optimizer.

    *Communication*: one all-reduce of the gradients in buckets; with ``overlap`` all buckets but
    the last leave during backward. *Memory*: one flat copy of the gradients; with a lossy wire its
    errors, and with ``overlap`` what they were before.

    Args:
        fabric: The communicator.
        parameters: The optimizer's parameters in the model's order, the same on all workers.
        wire: Sums the gradients; None sends them as they are.
        name: Begins the names of the wire's streams: another one for each optimizer.
        slots: Numbers that the caller sends along and gets back summed.
        overlap: Start buckets during backward.
        bucket_bytes: Size of a bucket.
    """

    def __init__(
        self,
        fabric: Communicator,
        parameters: Sequence[nn.Parameter],
        *,
        wire: Wire | None = None,
        name: str = "gradients",
        slots: int = 0,
        overlap: bool,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._fabric, self._slots = fabric, slots
        self._wire = Wire(fabric) if wire is None else wire
        order = [p for p in reversed(parameters) if p.numel()]
        groups = group_tensors(order, bucket_bytes, min(bucket_bytes, _FIRST_BUCKET_BYTES))
        # Backward completes first the bucket whose last parameter comes first in `order`.
        place = {id(p): i for i, p in enumerate(order)}
        groups.sort(key=lambda group: place[id(group[-1])])
        agreed = slots + 2 + len(order)  # the caller's, changed, contributing, has a gradient
        tail = agreed if len(groups) == 1 and self._wire.exact else 0
        self._buckets = [
            _GradientBucket([p for p in g if isinstance(p, nn.Parameter)], tail, f"{name} {i}")
            for i, g in enumerate(groups)
        ]
        self._bucket_of = {id(p): b for b in self._buckets for p in b.parameters}
        self._passes = 1  # backward passes per step, learned
        self._seen: dict[int, int] = {}
        self._next = 0  # the first bucket that has not left
        self._strikes = 0
        self.overlap = overlap and len(self._buckets) > 1
        self._hooks: list[RemovableHandle] = []
        if self.overlap:
            self._hooks = [p.register_post_accumulate_grad_hook(self._ready) for p in order]
        self._begin()

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _begin(self) -> None:
        self._seen.clear()
        self._next = 0
        for bucket in self._buckets:
            bucket.waiting = len(bucket.parameters)

    def _ready(self, parameter: Tensor) -> None:
        """Autograd has added to ``parameter.grad``."""
        key = id(parameter)
        seen = self._seen[key] = self._seen.get(key, 0) + 1
        if seen != self._passes or not self.overlap:
            return
        self._bucket_of[key].waiting -= 1
        while self._next < len(self._buckets) - 1 and self._buckets[self._next].waiting == 0:
            self._launch(self._buckets[self._next], contribute=True)
            self._next += 1

    def _launch(self, bucket: _GradientBucket, *, contribute: bool) -> None:
        flat = bucket.pack(float(contribute))
        if self.overlap:
            bucket.remember()
        if bucket.tail.numel():
            bucket.handle = self._fabric.sum(flat, what="mean of the gradients")
            return
        bucket.handle = self._wire.sum(
            flat,
            stream=bucket.stream,
            what="mean of the gradients",
            contribute=contribute,
            # all but the last may have to be sent again
            tentative=self.overlap and bucket is not self._buckets[-1],
        )

    def reduce(self, slots: Sequence[float], *, contribute: bool) -> list[float]:
        """Replace the gradients by their mean over the contributing workers. Blocks.

        Args:
            slots: The caller's numbers, ``slots`` of them.
            contribute: False sends zeros, and leaves the gradients as they are.

        Returns:
            The caller's numbers summed over the workers.
        """
        early = self._buckets[: self._next]
        stale = any(b.changed() for b in early) if contribute else bool(early)
        parameters = [p for b in self._buckets for p in b.parameters]
        has = [float(contribute and p.grad is not None) for p in parameters]
        others = self._buckets[:-1]
        for bucket in others[self._next :]:
            self._launch(bucket, contribute=contribute)
        agreed = self._agree([*slots, float(stale), float(contribute), *has], contribute)
        sums = agreed.wait().tolist()
        changed, contributing = sums[self._slots : self._slots + 2]
        present = [count > 0 for count in sums[self._slots + 2 :]]
        if changed:  # somewhere a bucket left too early: all workers send all of them again
            for bucket in others:
                bucket.wait()
                self._wire.take_back(bucket.stream)
            for bucket in others:
                self._launch(bucket, contribute=contribute)
        offset = 0
        for bucket in self._buckets:
            bucket.wait()
            count = len(bucket.parameters)
            if contribute:
                bucket.distribute(contributing, present[offset : offset + count])
            offset += count
        self._learn(bool(changed))
        self._begin()
        return sums[: self._slots]

    def _agree(self, numbers: list[float], contribute: bool) -> Handle[Tensor]:
        """Send ``numbers``, then the last bucket; or in its tail, if it has one."""
        last = self._buckets[-1]
        if last.tail.numel():
            last.tail.copy_(torch.tensor(numbers, dtype=last.flat.dtype))
            self._launch(last, contribute=contribute)
            return last.handle.then(lambda _: last.tail)
        flat = torch.tensor(numbers, dtype=torch.float64, device=self._fabric.control_device)
        handle = self._fabric.sum(flat, what="agreement on the gradients")
        self._launch(last, contribute=contribute)
        return handle

    def _learn(self, changed: bool) -> None:
        """Expect as many backward passes as this step had; stop overlapping where it misleads.

        Every worker learns the same from the common ``changed``, except for the number of passes,
        which only decides how early its own buckets leave.
        """
        if not self.overlap:
            return
        self._passes = max(self._seen.values(), default=1)
        self._strikes = self._strikes + 1 if changed else 0
        if self._strikes > _STRIKES:
            self.overlap = False
            self.close()
