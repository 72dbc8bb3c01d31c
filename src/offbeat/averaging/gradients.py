"""The mean of gradients over the workers, in buckets, optionally overlapped with backward.

Buckets follow the reverse order of the parameters, in which backward fills them. All but the last
may start while backward still runs; the last one starts when the optimizer is about to step. Just
before it leaves what the workers must agree on: their roll, whether a gradient changed after its
bucket had left (accumulation, clipping, unscaling), and which parameters have a gradient. A single
bucket carries these numbers in its tail, unless the wire is lossy: they travel exactly.

Sparse gradients travel dense, and their mean is sparse again: some optimizers take no other.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from offbeat.averaging.parts.landing import Landing, land
from offbeat.averaging.replica import BUCKET_BYTES, Bucket, group_tensors, pack, swap, unpack
from offbeat.quantization.wire import Wire
from offbeat.transport.handle import Completed, Handle
from offbeat.transport.team import Team

FIRST_BUCKET_BYTES = 2**20  # small, so that the network gets to work early in backward
_STRIKES = 2  # windows in a row that may start too early before the overlap is given up
_SPARSE = 2**12  # what a sparse gradient counts besides 1: sums of both are exact in float32
_Layout = Literal["none", "dense", "sparse"]


def gradient_buckets(
    parameters: Sequence[nn.Parameter], bucket_bytes: float = BUCKET_BYTES, scale: float = 1.0
) -> list[list[nn.Parameter]]:
    """The parameters of one optimizer in buckets, in the order in which backward completes them.

    Args:
        parameters: In the model's order, the same on all workers.
        bucket_bytes: Size of a bucket; the first one is smaller.
        scale: ``Host.scale``.
    """
    order = [p for p in reversed(parameters) if p.numel()]
    first = min(bucket_bytes, FIRST_BUCKET_BYTES)
    groups = group_tensors(order, bucket_bytes / scale, first / scale)
    # Backward completes first the bucket whose last parameter comes first in `order`.
    place = {id(p): i for i, p in enumerate(order)}
    groups.sort(key=lambda group: place[id(group[-1])])
    return [[p for p in group if isinstance(p, nn.Parameter)] for group in groups]


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
        if smallest.grad is not None and not smallest.grad.is_sparse:
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

    def landing(self, divisor: float, layouts: list[_Layout]) -> Landing:
        """How the mean gets into the gradients; a gradient nobody has stays None."""
        targets: list[Tensor] = []
        missing: list[tuple[nn.Parameter, Tensor, _Layout]] = []
        for parameter, layout in zip(self.parameters, layouts, strict=True):
            gradient = parameter.grad
            if gradient is None or gradient.is_sparse:
                gradient = torch.empty_like(parameter)  # a place to unpack into
                if layout != "none":
                    missing.append((parameter, gradient, layout))
            targets.append(gradient)

        def put() -> None:
            for parameter, gradient, layout in missing:
                parameter.grad = _rows(gradient) if layout == "sparse" else gradient

        def write() -> None:
            unpack(self.body, targets, divisor)
            put()

        before = [(parameter, parameter.grad) for parameter, _, _ in missing]

        def exchange() -> None:
            swap(self.body, targets, divisor)
            put()

        def undo() -> None:
            unpack(self.body, targets)
            for parameter, gradient in before:
                parameter.grad = gradient

        return Landing(self.handle, write, exchange, undo)


def _version(parameter: nn.Parameter) -> tuple[int, int] | None:
    gradient = parameter.grad
    return None if gradient is None else (id(gradient), gradient._version)


def _rows(dense: Tensor) -> Tensor:
    """The rows of ``dense`` that are not 0, as a sparse tensor."""
    rows = dense.reshape(len(dense), -1).any(1).nonzero().t()
    values, size = dense[rows[0]], dense.shape
    return torch.sparse_coo_tensor(rows, values, size, is_coalesced=True, check_invariants=False)


def _presence(gradient: Tensor | None) -> float:
    """What a worker adds to the number that tells of one gradient."""
    return 0.0 if gradient is None else 1.0 + _SPARSE * gradient.is_sparse


def _layout(count: float) -> _Layout:
    """What the sum of ``_presence`` says: sparse if it is so wherever there is a gradient."""
    sparse, holders = divmod(round(count), _SPARSE)
    return "none" if holders == 0 else "sparse" if sparse == holders else "dense"


class GradientMean:
    """g ← Σ g / (number of contributing workers), for the parameters of one optimizer.

    *Communication*: one all-reduce of the gradients in buckets; with ``overlap`` all buckets but
    the last leave during backward. A sparse gradient travels dense; where all that have one have it
    sparse, the mean is sparse on all workers: the rows that are not 0. *Memory*: one flat copy of
    the gradients; with a lossy wire its errors, and with ``overlap`` what they were before.

    Args:
        team: The workers.
        wire: Sums the gradients.
        buckets: The optimizer's parameters, from ``gradient_buckets``.
        name: Begins the names of the wire's streams: another one for each optimizer.
        slots: Numbers that the caller sends along and gets back summed.
        overlap: ``start`` may be called while backward runs.

    Attributes:
        overlap: Whether that still makes sense; all workers give it up together.
    """

    def __init__(
        self,
        team: Team,
        wire: Wire,
        buckets: Sequence[Sequence[nn.Parameter]],
        *,
        name: str = "gradients",
        slots: int = 0,
        overlap: bool = False,
    ) -> None:
        self._team, self._wire, self._slots = team, wire, slots
        parameters = sum(map(len, buckets))
        agreed = slots + 2 + parameters  # the caller's, changed, contributing, has a gradient
        tail = agreed if len(buckets) == 1 and self._wire.exact else 0
        self._buckets = [
            _GradientBucket(group, tail, f"{name} {i}") for i, group in enumerate(buckets)
        ]
        self._next = 0  # the first bucket that has not left
        self._strikes = 0
        self.overlap = overlap and len(self._buckets) > 1

    def start(self, index: int) -> None:
        """The gradients of bucket ``index`` are complete: send them. In order, never the last."""
        if self.overlap and index == self._next:
            self._launch(self._buckets[index], contribute=True)
            self._next += 1

    def _launch(self, bucket: _GradientBucket, *, contribute: bool) -> None:
        flat = bucket.pack(float(contribute))
        if self.overlap:
            bucket.remember()
        if bucket.tail.numel():
            tail = bucket.tail.numel()
            bucket.handle = self._team.communicator.sum(
                flat, what="mean of the gradients", tail=tail
            )
            return
        bucket.handle = self._wire.sum(
            flat,
            stream=bucket.stream,
            what="mean of the gradients",
            contribute=contribute,
            # all but the last may have to be sent again
            tentative=self.overlap and bucket is not self._buckets[-1],
        )

    def reduce(
        self, slots: Sequence[float], *, contribute: bool, take: bool | None = None
    ) -> list[float]:
        """Replace the gradients by their mean over the contributing workers. Blocks.

        No gradient is written before all means have arrived.

        Args:
            slots: The caller's numbers, ``slots`` of them.
            contribute: False sends zeros, and leaves the gradients as they are.
            take: Replace the gradients; None: if it contributes.

        Returns:
            The caller's numbers summed over the workers.
        """
        if not self._buckets:  # of empty tensors there is nothing to send but the numbers
            sums: list[float] = self._sum([*slots]).wait().tolist()
            return sums
        # What left during backward was the gradient only if nobody has touched it since: a further
        # backward pass, a clip. Each worker sees its own part; the sum says whether all may go on.
        take = contribute if take is None else take
        early = self._buckets[: self._next]
        stale = any(b.changed() for b in early) if contribute else bool(early)
        parameters = [p for b in self._buckets for p in b.parameters]
        has = [_presence(p.grad) if contribute else 0.0 for p in parameters]
        others = self._buckets[:-1]
        for bucket in others[self._next :]:
            self._launch(bucket, contribute=contribute)
        agreed = self._agree([*slots, float(stale), float(contribute), *has], contribute)
        sums = agreed.wait().tolist()
        changed, contributing = sums[self._slots : self._slots + 2]
        layouts = [_layout(count) for count in sums[self._slots + 2 :]]
        if changed:
            # Somewhere a bucket left too early: all workers send all of them again, alike, and the
            # wire forgets the errors of the first time, or it would feed them back twice.
            for bucket in others:
                bucket.handle.wait()
                self._wire.undo(bucket.stream)
            for bucket in others:
                self._launch(bucket, contribute=contribute)
        landings, offset = [], 0
        for bucket in self._buckets:
            count = len(bucket.parameters)
            if take and contributing:
                landings.append(bucket.landing(contributing, layouts[offset : offset + count]))
            else:
                landings.append(Landing(bucket.handle, write=lambda: None))
            offset += count
        land(landings, self._team.host)
        if self.overlap:  # learned from what is common, so that all workers learn the same
            self._strikes = self._strikes + 1 if changed else 0
            self.overlap = self._strikes <= _STRIKES
        self._next = 0
        return sums[: self._slots]

    def _agree(self, numbers: list[float], contribute: bool) -> Handle[Tensor]:
        """Send ``numbers``, then the last bucket; or in its tail, if it has one."""
        last = self._buckets[-1]
        if last.tail.numel():
            last.tail.copy_(torch.tensor(numbers, dtype=last.flat.dtype))
            self._launch(last, contribute=contribute)
            return last.handle.then(lambda _: last.tail)
        handle = self._sum(numbers)
        self._launch(last, contribute=contribute)
        return handle

    def _sum(self, numbers: list[float]) -> Handle[Tensor]:
        flat = torch.tensor(
            numbers, dtype=torch.float64, device=self._team.communicator.control_device
        )
        return self._team.communicator.sum(flat, what="agreement on the gradients")
