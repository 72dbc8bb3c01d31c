"""Means of the floating-point buffers, such as statistics of BatchNorm, while workers train."""

import torch
from torch import Tensor

from offbeat.averaging.flat import make_flats
from offbeat.averaging.worker import Worker


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
        flats = make_flats(worker.replica.float_buffers())
        self._sent = [flat.copy() for flat in flats]
        self._sums = [
            worker.team.communicator.sum(flat.copy(weight=weight), what=what) for flat in flats
        ]

    def wait(self) -> None:
        """Wait until the sums have arrived."""
        for future in self._sums:
            future.wait()

    def write(self, total: float) -> None:
        """Move the buffers to their mean. ``total``: sum of all workers' weights."""
        worker = self._worker
        # A forward pass may have replaced the tensors.
        flats = make_flats(worker.replica.float_buffers())
        for flat, sent, future in zip(flats, self._sent, self._sums, strict=True):
            values = future.wait() * (1 / total)
            if worker.model_version > self._step and self._weight:
                values = moved_to_mean(flat.copy(), values, sent)
            flat.write(0, values)


def moved_to_mean(current: Tensor, mean: Tensor, sent: Tensor) -> Tensor:
    """Return current + (mean − sent), but no element beyond its mean or moved away from it.

    Adding mean − sent without this limit could make a running variance of BatchNorm negative. With
    it the result lies between the old variance and the mean variance.

    Args:
        current: Values of buffers.
        mean: Mean over the workers of the values that they have sent.
        sent: Values that this worker has sent.
    """
    shifted = current + (mean - sent)
    lower, upper = torch.minimum(current, mean), torch.maximum(current, mean)
    clamped = torch.minimum(torch.maximum(shifted, lower), upper)
    # A value that has not changed since it was sent is set to the mean directly. For infinite
    # values, as in an attention mask, the formula would give ∞ − ∞ = NaN. A NaN becomes the mean,
    # too.
    replaced = (current == sent) | current.isnan() | sent.isnan()
    return torch.where(replaced, mean, clamped)
