"""The mean of whole models over the workers, never quantized.

It is used for a *consensus*, which replaces each local model by the mean, temporarily or at the end
of training. It is also used when workers join or are lost, and between the workers of one node.
"""

import torch

from offbeat.averaging.buckets import Bucket
from offbeat.averaging.landing import Landing, bucket_landing, land
from offbeat.averaging.replica import Contents, Replica
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
        self._team, self._copies = team.of_models, team.copies
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

    def average(
        self, weight: float, total: float, *, what: str, kind: Contents = "averaged"
    ) -> None:
        """Replace the model by the mean."""
        buckets = self._replica.buckets(kind)
        landings = [self._launch(bucket, weight, total, what) for bucket in buckets]
        land([*landings, *self._launch_integers(what)], self._team.host)

    def average_buffers(self, weight: float, total: float, *, what: str) -> None:
        """Replace the buffers as ``average`` does, but leave the parameters unchanged."""
        self.average(weight, total, what=what, kind="buffers")

    def average_integers(self, *, what: str) -> None:
        """Replace the signed integer buffers by their maximum."""
        land(self._launch_integers(what), self._team.host)

    def show(self, weight: float, total: float, *, what: str) -> None:
        """Replace the model by the mean. The caller restores the model afterwards.

        Stages only two buckets at a time, to save memory. A failure may leave only some tensors
        averaged, so the caller must hold a snapshot of the model.
        """
        pending: list[tuple[Bucket, Landing]] = []
        buckets = self._replica.buckets("averaged")
        for bucket in [*buckets, None, None]:
            if len(pending) == 2 or (bucket is None and pending):
                oldest, landing = pending.pop(0)
                land([landing], self._team.host)
                oldest.release()
            if bucket is not None:
                pending.append((bucket, self._launch(bucket, weight, total, what)))
        self.average_integers(what=what)

    def _launch(self, bucket: Bucket, weight: float, total: float, what: str) -> Landing:
        handle = self._team.communicator.sum(bucket.pack(weight), what=what)
        return bucket_landing(handle, bucket, total * self._copies)

    def _launch_integers(self, what: str) -> list[Landing]:
        integers = self._replica.integer_buffers()
        if not integers:
            return []
        device = self._team.communicator.control_device
        flat = torch.cat([t.detach().reshape(-1).to(device, torch.int64) for t in integers])

        def write() -> None:
            parts = flat.split([t.numel() for t in integers])
            for tensor, part in zip(integers, parts, strict=True):
                tensor.copy_(part.view(tensor.shape))

        return [Landing(self._team.communicator.maximum(flat, what=what), write)]
