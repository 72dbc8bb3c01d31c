"""The mean of gradients over the workers, in buckets, optionally overlapped with backward.

The buckets contain the parameters in reverse order, because backward computes the gradients of the
last layers first. All buckets but the last may be sent while backward still runs. The last bucket
is sent at the end of backward.

Together with the last bucket the workers sum some numbers, the *agreement*:

- the caller's numbers, such as votes;
- the number of workers that contribute gradients;
- for each parameter, the number of workers that contribute a gradient, and how many of these
  gradients are sparse.

The gradients are quantized if the wire saves bytes. The agreement is never quantized. It is part
of the bucket's message if there is only one bucket and the wire does not quantize. Otherwise it is
a separate message.

Sparse gradients are sent as dense ones. The mean is made sparse again if all gradients of the
parameter are sparse, because some optimizers accept only sparse gradients.
"""

import itertools
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from offbeat.averaging.buckets import (
    BUCKET_BYTES,
    Bucket,
    group_tensors,
    pack,
    staging_dtype,
    unpack,
)
from offbeat.errors import OffbeatError
from offbeat.quantization.message import QuantizedMessage, Stream
from offbeat.quantization.wire import Wire
from offbeat.transport.handle import Completed, Handle

FIRST_BUCKET_BYTES = 2**20  # small, so that the network is busy early in backward
_SPARSE = 2**12  # see ``_presence``
_Layout = Literal["none", "dense", "sparse"]


def gradient_buckets(
    parameters: Sequence[nn.Parameter], bucket_bytes: float = BUCKET_BYTES
) -> list[list[nn.Parameter]]:
    """Return the parameters in buckets, in the order in which backward computes their gradients.

    Args:
        parameters: Parameters of one optimizer in the model's order, the same on all workers.
        bucket_bytes: Largest size of a bucket in bytes, unless a single parameter is larger. The
            first bucket is full once it holds 1 MiB.
    """
    order = [p for p in reversed(parameters) if p.numel()]
    first = min(bucket_bytes, FIRST_BUCKET_BYTES)
    groups = group_tensors(order, bucket_bytes, first)
    # A bucket is complete when backward has computed the gradient of its last parameter, so the
    # buckets are sorted by their last parameters.
    position = {id(p): i for i, p in enumerate(order)}
    groups.sort(key=lambda group: position[id(group[-1])])
    return [[p for p in group if isinstance(p, nn.Parameter)] for group in groups]


class _GradientBucket(Bucket):
    """A bucket that copies the gradients of its parameters to a flat *staging tensor* for sending.

    A missing gradient counts as zero.

    Args:
        parameters: The parameters.
        tail: Number of extra elements at the end of the staging tensor, for the agreement.
        wire: Precision of the sums.

    Attributes:
        stream: Quantization errors. None if the bucket is sent exactly.
        handle: The newest sum, in flight or complete.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], tail: int, wire: Wire) -> None:
        super().__init__(parameters, tail)
        self.parameters = list(parameters)
        dtype, device = staging_dtype(parameters[0]), parameters[0].device
        self.stream: Stream | None = None
        if wire.saves(self.elements, dtype.itemsize):
            self.stream = Stream([(self.elements, dtype, device)], wire.team.size, device)
            self.stream.make_errors(residual=True)
        self.handle: Handle[Tensor] = Completed(torch.empty(0, device="cpu"))

    def pack(self, weight: float = 1.0) -> Tensor:
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self.parameters]
        pack([g.to_dense() if g.is_sparse else g for g in gradients], self.body, weight)
        return self.flat

    def write(self, divisor: float, layouts: Sequence[_Layout]) -> None:
        """Replace the gradients by the sum / ``divisor``.

        ``layouts`` has the layout of the mean for each parameter. "none": no worker contributes a
        gradient, so a ``grad`` of None stays None.
        """
        targets: list[Tensor] = []
        # New gradients for parameters whose gradient is missing or sparse.
        assigned: list[tuple[nn.Parameter, Tensor, _Layout]] = []
        for parameter, layout in zip(self.parameters, layouts, strict=True):
            gradient = parameter.grad
            if gradient is None or gradient.is_sparse:
                gradient = torch.empty_like(parameter)
                if layout != "none":
                    assigned.append((parameter, gradient, layout))
            targets.append(gradient)
        unpack(self.body, targets, divisor)
        for parameter, gradient, layout in assigned:
            parameter.grad = _to_sparse(gradient) if layout == "sparse" else gradient


def _to_sparse(dense: Tensor) -> Tensor:
    """Return the nonzero rows of ``dense`` as a sparse tensor."""
    rows = dense.reshape(len(dense), -1).any(1).nonzero().t()
    values, size = dense[rows[0]], dense.shape
    return torch.sparse_coo_tensor(rows, values, size, is_coalesced=True, check_invariants=False)


def _presence(gradient: Tensor | None) -> float:
    """Return 0 if there is no gradient, 1 for a dense and 1 + 4096 for a sparse one.

    The sum over the workers is s·4096 + n, with n gradients, of which s are sparse. It is exact in
    float32 for at most 4095 workers.
    """
    return 0.0 if gradient is None else 1.0 + _SPARSE * gradient.is_sparse


def _layout(count: float) -> _Layout:
    """Return the layout of a mean from the sum of ``_presence`` over the workers."""
    sparse, holders = divmod(round(count), _SPARSE)
    return "none" if holders == 0 else "sparse" if sparse == holders else "dense"


class GradientMean:
    """g ← Σ g / (number of contributing workers), for the parameters of one optimizer.

    *Communication*: one all-reduce of the gradients in buckets, and the agreement. *Memory*: one
    flat copy of the gradients. A quantized sum also stores its quantization errors.

    Args:
        wire: The workers, and the precision of the gradients.
        buckets: The optimizer's parameters, from ``gradient_buckets``.
        slots: Number of extra numbers that ``reduce`` sums over the workers for its caller.
        overlap: True to allow calls of ``start`` while backward runs.

    Attributes:
        errors: Quantization errors of both stages, for each bucket that is quantized.
    """

    def __init__(
        self,
        wire: Wire,
        buckets: Sequence[Sequence[nn.Parameter]],
        *,
        slots: int = 0,
        overlap: bool = False,
    ) -> None:
        self._team, self._wire, self._slots = wire.team, wire, slots
        parameters = sum(map(len, buckets))
        # Length of the agreement. The 1 is the number of contributing workers.
        tail = slots + 1 + parameters if len(buckets) == 1 and wire.exact else 0
        self._buckets = [_GradientBucket(group, tail, wire) for group in buckets]
        streams = [bucket.stream for bucket in self._buckets if bucket.stream]
        self.errors = [e for s in streams for e in (s.residual, s.errors) if e is not None]
        self._next = 0  # index of the first bucket that was not sent
        self.overlap = overlap

    def start(self, index: int) -> None:
        """Send bucket ``index``, whose gradients are complete. ``reduce`` sends the last bucket.

        Requires ``overlap``. Call it for all buckets but the last, in order.
        """
        assert self.overlap
        assert index == self._next
        self._launch(self._buckets[index], contribute=True)
        self._next += 1

    def _launch(self, bucket: _GradientBucket, *, contribute: bool) -> None:
        flat = bucket.pack(float(contribute))
        what = "mean of the gradients"
        if bucket.stream is None:
            bucket.handle = self._team.communicator.sum(flat, what=what)
            return
        message = QuantizedMessage(self._wire, self._wire.precision, [bucket.stream], what)
        if contribute:
            message.write(0, 0, 0, flat)
        else:
            message.clear()

        def read(_: object) -> Tensor:
            message.read(0, 0, 0, flat)
            return flat

        bucket.handle = message.start(None).then(read)

    def reduce(self, slots: Sequence[float], *, contribute: bool) -> list[float]:
        """Replace the gradients by their mean over the contributing workers. Blocks.

        If a sum fails, or if no worker contributes, no gradient changes.

        Args:
            slots: The caller's numbers, as many as the constructor's argument ``slots``.
            contribute: True if this worker's gradients are part of the mean, and are replaced by
                it. False sends zeros.

        Returns:
            The caller's numbers summed over the workers.
        """
        if not self._buckets:  # the optimizer has only empty parameters
            sums: list[float] = self._sum([*slots]).wait().tolist()
            return sums
        if self._next and not contribute:
            raise OffbeatError(
                "a backward pass failed after a part of its gradients was sent to the other "
                "workers: call detach(), so that they do not wait for the rest"
            )
        for bucket in self._buckets[self._next : -1]:
            self._launch(bucket, contribute=contribute)
        numbers = [*slots, float(contribute), *self._presence(contribute)]
        sums = self._agree(numbers, contribute).wait().tolist()
        self._land(sums[self._slots] if contribute else 0, sums[self._slots + 1 :])
        self._next = 0
        return sums[: self._slots]

    def _presence(self, contribute: bool) -> list[float]:
        """Return the result of the function ``_presence`` for each parameter, or zeros."""
        parameters = [p for bucket in self._buckets for p in bucket.parameters]
        return [_presence(p.grad) if contribute else 0.0 for p in parameters]

    def _land(self, divisor: float, counts: Sequence[float]) -> None:
        """Replace the gradients by the buckets' sums / ``divisor``, all of them or none.

        ``counts`` are the sums of ``_presence`` over the workers. With ``divisor`` 0 nothing is
        written.
        """
        for bucket in self._buckets:
            bucket.handle.wait()
        if divisor:
            layouts = iter([_layout(count) for count in counts])
            for bucket in self._buckets:
                bucket.write(divisor, list(itertools.islice(layouts, len(bucket.parameters))))

    def _agree(self, numbers: list[float], contribute: bool) -> Handle[Tensor]:
        """Send the last bucket, and sum ``numbers`` over the workers."""
        last = self._buckets[-1]
        if last.tail.numel():
            last.tail.copy_(torch.tensor(numbers, dtype=last.flat.dtype, device="cpu"))
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
