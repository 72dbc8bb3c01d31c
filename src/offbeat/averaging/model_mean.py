"""The mean of whole models over the workers, never quantized.

It is used for a *consensus*, which replaces each local model by the mean, temporarily or at the end
of training. It is also used when workers join or are lost, and between the workers of one node.
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
            flat, communicator = Flat(counters), self._team.communicator
            device = communicator.control_device
            values = torch.empty(flat.elements, dtype=torch.int64, device=device)
            flat.read(0, values)
            yield flat, 0, communicator.maximum(values, what=what)
