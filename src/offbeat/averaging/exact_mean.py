"""The mean of whole models over the workers, never quantized.

It is used for a *consensus*, which replaces each local model by the mean, temporarily or at the end
of training. It is also used when workers join or are lost, and between the workers of one node.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from offbeat.averaging.buckets import Bucket, make_buckets, pack_mixed, unpack
from offbeat.averaging.replica import Replica
from offbeat.transport.handle import Completed, Handle
from offbeat.transport.team import Team


class ExactMean:
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
        self._team, self._copies = team.replica_team, team.copies
        self._replica = replica

    def consensus(self, weight: float, total: float, *, final: bool, what: str) -> None:
        """Replace the model by the mean, permanently (``final``) or until the caller restores it.

        If ``total`` is 0, only signed integer buffers change.
        """
        if not total:
            self.average_integers(what=what)
        elif final:
            self.average(weight, total, what=what)
        else:
            self.show(weight, total, what=what)

    def average(self, weight: float, total: float, *, what: str) -> None:
        """Replace the model by the mean."""
        self.average_tensors(self._replica.averaged(), weight, total, what=what, integers=True)

    def average_buffers(self, weight: float, total: float, *, what: str) -> None:
        """Replace the buffers as ``average`` does, but leave the parameters unchanged."""
        self.average_tensors(self._replica.float_buffers(), weight, total, what=what, integers=True)

    def average_integers(self, *, what: str) -> None:
        """Replace the signed integer buffers by their maximum."""
        self.average_tensors([], 0.0, 1.0, what=what, integers=True)

    def average_tensors(
        self,
        tensors: Iterable[Tensor],
        weight: float,
        total: float,
        *,
        what: str,
        integers: bool = False,
    ) -> None:
        """Replace any floating-point or complex tensors by their mean.

        ``integers`` True also replaces the signed integer buffers by their maximum.
        """
        buckets = make_buckets(tensors)
        handles = [self._start(bucket, weight, what) for bucket in buckets]
        counters = self._replica.integer_buffers() if integers else []
        maximum = self._start_maximum(counters, what)
        # The results are written after the last operation has succeeded.
        for handle in (*handles, maximum):
            handle.wait()
        for bucket in buckets:
            bucket.unpack(total * self._copies)
        unpack(maximum.wait(), counters)

    def show(self, weight: float, total: float, *, what: str) -> None:
        """Replace the model by the mean. The caller restores the model afterwards.

        Stages only two buckets at a time, to save memory. A failure may leave only some tensors
        averaged, so the caller must hold a snapshot of the model.
        """
        pending: list[tuple[Bucket, Handle[Tensor]]] = []
        for bucket in [*make_buckets(self._replica.averaged()), None, None]:
            if len(pending) == 2 or (bucket is None and pending):
                oldest, handle = pending.pop(0)
                handle.wait()
                oldest.unpack(total * self._copies)
                oldest.release()
            if bucket is not None:
                pending.append((bucket, self._start(bucket, weight, what)))
        self.average_integers(what=what)

    def _start(self, bucket: Bucket, weight: float, what: str) -> Handle[Tensor]:
        return self._team.communicator.sum(bucket.pack(weight), what=what)

    def _start_maximum(self, counters: list[Tensor], what: str) -> Handle[Tensor]:
        device = self._team.communicator.control_device
        flat = torch.empty(sum(t.numel() for t in counters), dtype=torch.int64, device=device)
        pack_mixed(counters, flat)
        if not counters:
            return Completed(flat)
        return self._team.communicator.maximum(flat, what=what)
