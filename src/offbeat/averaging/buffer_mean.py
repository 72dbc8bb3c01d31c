"""Means of the floating-point buffers, such as statistics of BatchNorm, while workers train."""

from torch import Tensor

from offbeat.averaging.buckets import Bucket, add_clamped, make_buckets
from offbeat.averaging.worker import Worker
from offbeat.transport.handle import Handle


class BufferMean:
    """Starts the sums of a worker's buffers. They are small, and never quantized.

    Args:
        worker: This worker.
        weight: Weight of its buffers in the mean.
        what: Name of the operation in errors.
    """

    def __init__(self, worker: Worker, weight: float, *, what: str) -> None:
        self._worker, self._weight = worker, weight
        self._step = worker.step
        self._sums: list[tuple[Bucket, Tensor, Handle[Tensor]]] = []
        for bucket in make_buckets(worker.replica.float_buffers()):
            sent = bucket.pack().clone()
            handle = worker.team.communicator.sum(bucket.pack(weight), what=what)
            self._sums.append((bucket, sent, handle))

    def wait(self) -> None:
        """Wait until the sums have arrived."""
        for _, _, handle in self._sums:
            handle.wait()

    def write(self, total: float) -> None:
        """Move the buffers to their mean. ``total``: sum of all workers' weights."""
        worker = self._worker
        # A forward pass may have replaced the tensors.
        buckets = make_buckets(worker.replica.float_buffers())
        for (sums, sent, _), bucket in zip(self._sums, buckets, strict=True):
            if worker.model_version > self._step and self._weight:
                add_clamped(bucket.tensors, sums.flat * (1 / total), sent)
            else:
                sums.tensors = bucket.tensors
                sums.unpack(total)
