"""The mean of gradients over the workers, in buckets, optionally overlapped with backward.

The buckets contain the parameters in reverse order, because backward computes the gradients of the
last layers first. All buckets but the last may be sent while backward still runs. The last bucket
is sent at the end of backward.

At the end of backward the workers also gather the *agreement*, a few numbers of each worker:

- the caller's numbers, such as a vote;
- whether the worker contributes gradients;
- for each parameter, whether its gradient is missing, dense or sparse.

The gradients are quantized if the wire saves bytes. The agreement is never quantized.

Sparse gradients are sent as dense ones. The mean is made sparse again if all gradients of the
parameter are sparse, because some optimizers accept only sparse gradients.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from offbeat.averaging.flat import BUCKET_BYTES, as_real, staging_dtype
from offbeat.errors import OffbeatError
from offbeat.quantization.message import QuantizedMessage, Section, Stream
from offbeat.quantization.wire import Wire
from offbeat.transport.future import Completed, Future

FIRST_BUCKET_BYTES = 2**20  # small, so that the network is busy early in backward
_MISSING, _DENSE, _SPARSE = 0.0, 1.0, 2.0  # kinds of gradients: missing, dense, sparse


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
    buckets: list[list[nn.Parameter]] = []
    # The newest bucket of each dtype and device, and its bytes.
    newest: dict[tuple[torch.dtype, torch.device], tuple[list[nn.Parameter], int]] = {}
    for parameter in order:
        key = parameter.dtype, parameter.device
        size = _length(parameter) * staging_dtype(parameter).itemsize
        bucket, filled = newest.get(key, ([], 0))
        full = filled >= first if buckets and bucket is buckets[0] else filled + size > bucket_bytes
        if full or not bucket:
            bucket, filled = [], 0
            buckets.append(bucket)
        bucket.append(parameter)
        newest[key] = bucket, filled + size
    # A bucket is complete when backward has computed the gradient of its last parameter, so the
    # buckets are sorted by their last parameters.
    position = {id(p): i for i, p in enumerate(order)}
    return sorted(buckets, key=lambda bucket: position[id(bucket[-1])])


def _length(parameter: Tensor) -> int:
    """Return the number of reals of a parameter."""
    return as_real(parameter.detach()).numel()


class _GradientBucket:
    """Copies the gradients of some parameters to a flat tensor for sending, and their mean back.

    A missing gradient counts as zero.

    Args:
        parameters: The parameters, of one dtype and device.
        wire: Precision of the sums.

    Attributes:
        stream: Quantization errors. None if the bucket is sent exactly.
        future: The newest sum, in flight or complete.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], wire: Wire) -> None:
        self.parameters = list(parameters)
        self.lengths = [_length(p) for p in parameters]
        dtype, device = staging_dtype(parameters[0]), parameters[0].device
        self._dtype = dtype  # of all messages, also if a script converts its model
        self.stream: Stream | None = None
        if wire.saves(sum(self.lengths), dtype.itemsize):
            self.stream = Stream(sum(self.lengths), dtype, device)
            self.stream.make_errors(wire.team.size, residual=True)
        self.future: Future[Tensor] = Completed(torch.empty(0, device="cpu"))

    @cached_property
    def flat(self) -> Tensor:
        """The flat tensor, allocated at its first use."""
        device = self.parameters[0].device
        return torch.empty(sum(self.lengths), dtype=self._dtype, device=device)

    def pack(self, *, contribute: bool) -> Tensor:
        """Copy the gradients to ``flat``, or zeros, and return it."""
        if not contribute:
            return self.flat.zero_()
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self.parameters]
        dense = [g.detach().to_dense() if g.is_sparse else g.detach() for g in gradients]
        return torch.cat([as_real(g).reshape(-1) for g in dense], out=self.flat)

    def write(self, divisor: float, kinds: Sequence[float]) -> None:
        """Replace the gradients by the sum / ``divisor``. ``kinds``: see ``_Agreement``."""
        parts = self.flat.split(self.lengths)
        for parameter, part, kind in zip(self.parameters, parts, kinds, strict=True):
            gradient = parameter.grad
            if kind == _MISSING:
                continue
            if gradient is None or gradient.is_sparse or _is_expanded(gradient):
                gradient = torch.empty_like(parameter)
            numbers = as_real(gradient.detach())
            torch.mul(part.view(numbers.shape), 1 / divisor, out=numbers)
            if gradient is not parameter.grad:
                parameter.grad = _to_sparse(gradient) if kind == _SPARSE else gradient


def _to_sparse(dense: Tensor) -> Tensor:
    """Return the nonzero rows of ``dense`` as a sparse tensor."""
    rows = dense.reshape(len(dense), -1).any(1).nonzero().t()
    values, size = dense[rows[0]], dense.shape
    return torch.sparse_coo_tensor(rows, values, size, is_coalesced=True, check_invariants=False)


def _is_expanded(gradient: Tensor) -> bool:
    """Return True if several elements have the same address, so that they cannot be written."""
    return not gradient.is_contiguous() and 0 in gradient.stride()


def _kind_of(gradient: Tensor | None) -> float:
    return _MISSING if gradient is None else _SPARSE if gradient.is_sparse else _DENSE


class _Agreement(NamedTuple):
    """What all workers know when they average gradients.

    Attributes:
        rows: The caller's numbers of all workers, in the order of the ranks.
        contributing: Number of workers that contribute gradients.
        kinds: Kind of the mean for each parameter. It is sparse if all gradients that exist are
            sparse. If no worker contributes a gradient, a ``grad`` of None stays None.
    """

    rows: list[list[float]]
    contributing: float
    kinds: list[float]


class GradientMean:
    """g ← Σ g / (number of contributing workers), for the parameters of one optimizer.

    *Communication*: one all-reduce of the gradients in buckets, and an all-gather of the agreement,
    8 bytes for each parameter. *Memory*: one flat copy of the gradients. A quantized sum also
    stores its quantization errors.

    Args:
        wire: The workers, and the precision of the gradients.
        buckets: The optimizer's parameters, from ``gradient_buckets``.
        overlap: True to allow calls of ``start`` while backward runs.

    Attributes:
        errors: Quantization errors of both stages, for each bucket that is quantized.
    """

    def __init__(
        self,
        wire: Wire,
        buckets: Sequence[Sequence[nn.Parameter]],
        *,
        overlap: bool = False,
    ) -> None:
        self._team, self._wire = wire.team, wire
        self._buckets = [_GradientBucket(group, wire) for group in buckets]
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
        flat = bucket.pack(contribute=contribute)
        what = "mean of the gradients"
        if bucket.stream is None:
            bucket.future = self._team.communicator.sum(flat, what=what)
            return
        whole = Section(bucket.stream, 0, bucket.stream.elements)
        message = QuantizedMessage(self._wire, [whole], what)
        if contribute:
            message.write(0, 0, flat)
        else:
            message.clear()

        def read(_: object) -> Tensor:
            message.read(0, 0, flat)
            return flat

        bucket.future = message.start(None).then(read)

    def reduce(self, numbers: Sequence[float], *, contribute: bool) -> list[list[float]]:
        """Replace the gradients by their mean over the contributing workers. Blocks.

        If a sum fails, or if no worker contributes, no gradient changes.

        Args:
            numbers: The caller's numbers, equally many on all workers.
            contribute: True if this worker's gradients are part of the mean, and are replaced by
                it. False sends zeros.

        Returns:
            The caller's numbers of all workers, in the order of the ranks.
        """
        if self._next and not contribute:
            raise OffbeatError(
                "a backward pass failed after a part of its gradients was sent to the other "
                "workers: call detach(), so that they do not wait for the rest"
            )
        # In this order on all workers: ``start`` may have sent all buckets but the last.
        for bucket in self._buckets[self._next : -1]:
            self._launch(bucket, contribute=contribute)
        agreement = self._agree(numbers, contribute=contribute)
        for bucket in self._buckets[-1:]:
            self._launch(bucket, contribute=contribute)
        rows, contributing, kinds = agreement.wait()
        self._land(contributing if contribute else 0, kinds)
        self._next = 0
        return rows

    def _agree(self, numbers: Sequence[float], *, contribute: bool) -> Future[_Agreement]:
        """Start to gather the agreement. Arguments as in ``reduce``."""
        parameters = [p for bucket in self._buckets for p in bucket.parameters]
        kinds = [_kind_of(p.grad) if contribute else _MISSING for p in parameters]
        gathered = self._team.communicator.gather_numbers(
            [*numbers, float(contribute), *kinds], what="agreement on the mean of the gradients"
        )
        count = len(numbers)

        def read(rows: list[list[float]]) -> _Agreement:
            contributing, *columns = list(zip(*rows, strict=True))[count:]
            means = [min(filter(None, column), default=_MISSING) for column in columns]
            return _Agreement([row[:count] for row in rows], sum(contributing), means)

        return gathered.then(read)

    def _land(self, divisor: float, kinds: Sequence[float]) -> None:
        """Replace the gradients by the buckets' sums / ``divisor``, all of them or none.

        With ``divisor`` 0 nothing is written.
        """
        for bucket in self._buckets:
            bucket.future.wait()
        if divisor:
            rest = iter(kinds)
            for bucket in self._buckets:
                bucket.write(divisor, [next(rest) for _ in bucket.parameters])
