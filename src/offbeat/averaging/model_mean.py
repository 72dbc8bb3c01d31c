"""Means of whole models, and of their buffers, over the workers. They are never quantized.

``ModelMean`` is used for a *consensus*, which replaces each local model by the mean, temporarily or
at the end of training. It is also used when workers join or are lost, and between the workers of
one node. ``BufferMean`` averages the buffers while the workers train.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from offbeat.averaging.flat import Flat, make_flats
from offbeat.averaging.replica import Replica
from offbeat.transport.future import Future
from offbeat.transport.team import Team

_Range = tuple[Flat, int, Future[Tensor]]
"""Tensors, the first number of a range of them, and the sum of this range over the workers."""


class ModelMean:
    """x ← Σ w·x / Σ w over the workers, where x is a worker's model and w its weight.

    Trainable parameters, floating-point and complex buffers are averaged (float16 and bfloat16 in
    float32). Signed integer buffers become their maximum. Afterwards these tensors have the same
    bits on all workers. If an operation fails, the model does not change, except in ``show``.

    All methods are collectives and block. Their arguments:

        weight: Weight w of this worker (≥ 0).
        total: Sum of w over the workers, > 0.
        what: Name of the operations in error messages.
    """

    def __init__(self, team: Team, replica: Replica) -> None:
        # In a node each process sends its copy of the model: a ring then sends no more to other
        # nodes than one process would.
        self._team, self._copies, self._workers = team.replica_team, team.models_per_node, team.size
        self._replica = replica

    def consensus(self, weight: float, total: float, *, final: bool, what: str) -> None:
        """Replace the model by the mean, permanently (``final``) or until the caller restores it.

        If ``total`` is 0, no worker has new steps, and only the buffers change: a forward pass may
        have changed them. The workers then have equal weights.
        """
        if not total:
            self.average_buffers(1.0, self._workers, what=what)
        elif final:
            self.average(weight, total, what=what)
        else:
            self.show(weight, total, what=what)

    def average(self, weight: float, total: float, *, what: str) -> None:
        """Replace the model by the mean."""
        self._average(self._replica.averaged(), weight, total, what)

    def average_buffers(self, weight: float, total: float, *, what: str) -> None:
        """Replace the buffers as ``average`` does, but leave the parameters unchanged."""
        self._average(self._replica.float_buffers(included=True), weight, total, what)

    def _average(self, tensors: Iterable[Tensor], weight: float, total: float, what: str) -> None:
        """Replace ``tensors`` by their mean, and the signed integer buffers by their maximum."""
        sums, maxima = [*self._start(tensors, weight, what)], [*self._start_maximum(what)]
        # The results are written after the last operation has succeeded.
        for _, _, future in (*sums, *maxima):
            future.wait()
        for each in sums:
            self._write(*each, total)
        for counters, _, future in maxima:
            counters.write(0, future.wait())

    def show(self, weight: float, total: float, *, what: str) -> None:
        """Replace the model by the mean. The caller restores the model afterwards.

        Copies only two ranges at a time, to save memory. A failure may leave only some tensors
        averaged, so the caller must hold a snapshot of the model.
        """
        pending: list[_Range] = []
        for each in self._start(self._replica.averaged(), weight, what):
            pending.append(each)
            if len(pending) == 2:
                self._write(*pending.pop(0), total)
        for each in pending:
            self._write(*each, total)
        self._average([], weight, total, what)

    def _start(self, tensors: Iterable[Tensor], weight: float, what: str) -> Iterator[_Range]:
        """Start the sum of each range when the caller asks for it."""
        for flat in make_flats(tensors):
            for start, stop in flat.ranges():
                values = flat.copy(start, stop, weight=weight)
                yield flat, start, self._team.communicator.sum(values, what=what)

    def _write(self, flat: Flat, start: int, future: Future[Tensor], total: float) -> None:
        # Here and in all other means, a sum is multiplied by the rounded reciprocal of the divisor.
        # That is how CUDA divides by a number, and a CPU must give the same bits.
        flat.write(start, future.wait().mul_(1 / (total * self._copies)))

    def _start_maximum(self, what: str) -> Iterator[_Range]:
        """Start the maximum of the signed integer buffers in int64, if there are any."""
        counters = [each for each in self._replica.integer_buffers() if each.numel()]
        if counters:
            flat = Flat(counters)
            values = torch.empty(flat.elements, dtype=torch.int64, device="cpu")
            flat.read(0, values)
            yield flat, 0, self._team.communicator.maximum(values, what=what)


class BufferMean:
    """The mean of the floating-point buffers, such as BatchNorm statistics, while workers train.

    The constructor starts the sums over the workers.

    Args:
        team: The workers.
        replica: Tensors of this worker's model.
        weight: Weight of its buffers in the mean.
        step: Local step of this worker.
        what: Name of the operation in errors.
    """

    def __init__(
        self, team: Team, replica: Replica, weight: float, step: int, *, what: str
    ) -> None:
        self._replica, self._weight, self._step = replica, weight, step
        flats = make_flats(replica.float_buffers())
        self._sent = [flat.copy() for flat in flats]
        self._sums = [team.communicator.sum(flat.copy(weight=weight), what=what) for flat in flats]

    def wait(self) -> None:
        """Wait until the sums have arrived."""
        for future in self._sums:
            future.wait()

    def write(self, total: float, model_version: int) -> None:
        """Move the buffers to their mean.

        Args:
            total: Sum of all workers' weights.
            model_version: Greater than ``step`` if the model has changed since the constructor.
        """
        # A forward pass may have replaced the tensors.
        flats = make_flats(self._replica.float_buffers())
        for flat, sent, future in zip(flats, self._sent, self._sums, strict=True):
            values = future.wait() * (1 / total)
            if model_version > self._step and self._weight:
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


def copy_rank_0(team: Team, tensors: Iterable[Tensor]) -> None:
    """Copy rank 0's values of ``tensors`` to all workers, in place. A collective."""
    if team.everyone.size == 1:
        return
    communicator = team.replica_team.communicator
    what = "copy of rank 0's model"
    for flat in make_flats(tensors):
        for start, stop in flat.ranges():
            values = communicator.broadcast(flat.copy(start, stop), what=what).wait()
            if communicator.rank:
                flat.write(start, values)
