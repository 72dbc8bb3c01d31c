"""The mean of whole models, all or nothing: every sum has arrived before anything is written.

A worker that loses another one in the middle keeps its own model, whole, and can save it.
"""

from typing import Any

import torch
from torch import Tensor

from offbeat.fabric import Team, Wire
from offbeat.means.landing import Landing, bucket_landing, land
from offbeat.means.optimizer_state import OptimizerState
from offbeat.means.replica import Bucket, Replica, unpack


class ModelMean:
    """x ← Σ w·x / Σ w over the workers: parameters, buffers, and the optimizer's state if wanted.

    Parameters, floating-point and complex buffers are averaged (half types in float32), signed
    integer buffers take the maximum. Afterwards all workers hold the same bits of these.

    Over a lossy wire what travels is how far the parameters have moved from the last mean, r:

        r ← r + Σ w·(x − r) / Σ w;  x ← r

    Args:
        team: The workers, who hold the same model now.
        replica: This worker's model.
        wire: Sums the parameters.
        referenced: Keep r, one copy of the parameters, where the wire is lossy. Without it only
            exact means can be taken.

    Attributes:
        optimizer_state: Averaged at the same moments; None leaves it local.
    """

    def __init__(self, team: Team, replica: Replica, wire: Wire, *, referenced: bool) -> None:
        self._team, self._replica, self._wire = team, replica, wire
        self.optimizer_state: OptimizerState | None = None
        self._references: list[Tensor] = []
        if referenced and not wire.exact:
            self._references = [b.pack().clone() for b in replica.buckets("parameters")]

    def average(
        self, own: float, total: float, *, exact: bool = False, take: bool = True, what: str
    ) -> None:
        """Blocks until the mean is in the model.

        Args:
            own: w of this worker.
            total: Σ w over the workers, > 0.
            exact: Send float32 whatever the wire, and leave the optimizer's state alone.
            take: False only contributes, and keeps this worker's own model.
            what: Names the operations in errors.

        Raises:
            CommunicationError: another worker is lost; nothing was written.
            ValueError: the wire is lossy, and there is no reference.
        """
        lossy = not (exact or self._wire.exact)
        # Who does not take the mean takes its references all the same.
        moved = self._launch_lossy(own, total, take, what) if lossy else []
        buckets = self._replica.buckets("buffers" if lossy else "averaged")
        landings = [self._launch(bucket, own, total, what) for bucket in buckets]
        landings += self._launch_integers(what)
        if self.optimizer_state is not None and not exact:
            landings += self.optimizer_state.launch(own, total)
        if not take:
            landings = [Landing(landing.handle, write=lambda: None) for landing in landings]
        land([*moved, *landings], self._team.host)

    def average_buffers(self, own: float, total: float, *, what: str) -> None:
        """The same for the buffers alone, exactly."""
        buckets = self._replica.buckets("buffers")
        landings = [self._launch(bucket, own, total, what) for bucket in buckets]
        land([*landings, *self._launch_integers(what)], self._team.host)

    def average_optimizer_state(self, own: float, total: float) -> None:
        """The same for the optimizer's state alone, if it is wanted."""
        if self.optimizer_state is not None:
            land(self.optimizer_state.launch(own, total), self._team.host)

    def look(self, own: float, total: float, *, what: str) -> None:
        """An exact mean that is written as it comes, two buckets at a time.

        It needs next to no memory, and leaves half a mean behind if it fails: for those who have
        kept a snapshot of everything.
        """
        waiting: list[tuple[Bucket, Landing]] = []
        buckets = self._replica.buckets("averaged")
        for bucket in [*buckets, None, None]:
            if len(waiting) == 2 or (bucket is None and waiting):
                arrived, landing = waiting.pop(0)
                land([landing], self._team.host)
                arrived.release()
            if bucket is not None:
                waiting.append((bucket, self._launch(bucket, own, total, what)))
        land(self._launch_integers(what), self._team.host)

    def _launch(self, bucket: Bucket, own: float, total: float, what: str) -> Landing:
        return bucket_landing(self._team.fabric.sum(bucket.pack(own), what=what), bucket, total)

    def _launch_lossy(self, own: float, total: float, take: bool, what: str) -> list[Landing]:
        if not self._references and self._replica.parameters:
            raise ValueError(
                f"{what} over wire={self._wire.precision!r}: this strategy declares that it does "
                'not average models; declare averages = "models"'
            )
        landings: list[Landing] = []
        buckets = self._replica.buckets("parameters")
        for i, (bucket, reference) in enumerate(zip(buckets, self._references, strict=True)):
            flat = bucket.pack(own)
            if own:
                flat.sub_(reference, alpha=own)
            handle = self._wire.sum(flat, stream=f"model {i}", what=what, contribute=own != 0)

            def write(bucket: Bucket = bucket, reference: Tensor = reference) -> None:
                reference.add_(bucket.flat, alpha=1 / total)
                if take:
                    unpack(reference, bucket.tensors)

            landings.append(Landing(handle, write))
        return landings

    def _launch_integers(self, what: str) -> list[Landing]:
        integers = self._replica.integer_buffers()
        if not integers:
            return []
        device = self._team.fabric.control_device
        flat = torch.cat([t.detach().reshape(-1).to(device, torch.int64) for t in integers])

        def write() -> None:
            parts = flat.split([t.numel() for t in integers])
            for tensor, part in zip(integers, parts, strict=True):
                tensor.copy_(part.view(tensor.shape))

        return [Landing(self._team.fabric.maximum(flat, what=what), write)]

    def begin_anew(self) -> None:
        """The model as it is now, which all workers hold, is the last mean."""
        buckets = self._replica.buckets("parameters")
        for bucket, reference in zip(
            buckets, self._references, strict=False
        ):  # maybe there is none
            reference.copy_(bucket.pack())

    def state_dict(self) -> list[Tensor]:
        """The references, one a bucket of parameters; none with an exact wire."""
        return [reference.clone() for reference in self._references]

    def load_state_dict(self, state: list[Any]) -> None:
        """Continue from ``state_dict()``."""
        for reference, saved in zip(self._references, state, strict=True):
            reference.copy_(saved)
