"""A part of the shared model, from its launch to its landing: the base class.

There are two kinds. ``SnapshotPart`` sends a worker's tensors, or their difference to P, and the
wire keeps the quantization error. ``UpdatePart`` keeps the quantization error in the model.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offbeat.averaging.buckets import BUCKET_BYTES, group_tensors, unpack
from offbeat.averaging.norm import squared_norm
from offbeat.averaging.parts.landing import Landing, land
from offbeat.averaging.parts.part_bucket import PartBucket
from offbeat.checkpoint.state import transient
from offbeat.quantization.wire import Precision, Wire
from offbeat.strategies.base import Outer
from offbeat.transport.handle import Completed, Handle
from offbeat.transport.team import Team

_SHARED_BYTES = 2**20  # buffers of at most this size share a message with parameters

Tensors = Callable[[], Sequence[Tensor]]
"""Function that returns tensors. A part calls it at each launch, because modules may replace their
buffers or be moved."""


@dataclass(init=False, eq=False)
class Part(ABC):
    """A part of the shared model P on one worker.

    Args:
        team: The workers.
        wire: Sums the parameters over the workers.
        parameters: Function that returns the parameters of this part, or views into parameters.
        name: Name of the part in errors and in the streams of the wire; unique.
        buffers: Function that returns floating-point buffers to send with this part. They are
            averaged exactly.
        outer: The step of P. None: P ← P + D.
        step: Number of local steps so far.
        share_bucket: True if small buffers share a bucket, and so a message, with parameters.

    Attributes:
        base: P, one flat tensor for each bucket of parameters. Empty if P is not stored.
        velocity: v, one flat tensor for each bucket of parameters. Empty without outer momentum.
        buffer_base: Buffers at the last landing, one flat tensor for each bucket. Empty if P is not
            stored.
        sums: Sums in flight, one flat tensor for each bucket. Saved in checkpoints.
        own: Values that this worker has sent, one flat tensor for each bucket. Saved in
            checkpoints.
        in_flight: True from the launch to the landing.
        weight: Σ w over the workers, valid once ``wait`` has returned.
        launched_step: Local step of the last launch.
        synced_step: Local step up to which other workers have received this worker's steps.
        launched_seconds: Seconds on this worker's clock at the last launch.
        arrived_seconds: Seconds on this worker's clock at which the arrival was noticed. None
            before that.
        buckets: Buckets of parameters, followed by buckets of buffers only.
        keeps_base: True if this worker stores P, so that ``restore`` is possible.
        sent_squared: ‖u‖² of the last landing, measured with error feedback.
        mean_squared: ‖D‖² of the last landing, measured with error feedback.
    """

    base: list[Tensor]
    velocity: list[Tensor]
    buffer_base: list[Tensor]
    sums: list[Tensor]
    own: list[Tensor]
    in_flight: bool
    weight: float
    launched_step: int
    synced_step: int
    launched_seconds: float
    arrived_seconds: float | None
    buckets: list[PartBucket] = transient()
    keeps_base: bool = transient()
    sent_squared: float = transient()
    mean_squared: float = transient()

    def __init__(
        self,
        team: Team,
        wire: Wire,
        parameters: Tensors,
        *,
        name: str,
        buffers: Tensors = tuple,
        outer: Outer | None = None,
        step: int = 0,
        share_bucket: bool = False,
    ) -> None:
        self._team, self._wire, self._name = team, wire, name
        self._bucket_bytes = BUCKET_BYTES / team.host.scale
        self._outer = Outer() if outer is None else outer
        self._find_parameters, self._find_buffers = parameters, buffers
        self._shared: int | None = None  # index of the bucket of parameters that contains buffers
        self._make_buckets(share_bucket=share_bucket)
        self.base, self.velocity, self.buffer_base = [], [], []
        self.sums, self.own = [], []
        self.keeps_base, self.sent_squared, self.mean_squared = False, 0.0, 0.0
        self.in_flight, self.weight = False, 0.0
        self.launched_step = self.synced_step = step
        self.launched_seconds, self.arrived_seconds = 0.0, None
        self._total: Handle[float] = Completed(0.0)
        self._own_weight = 0.0
        self._handles: list[Handle[Any]] = []  # operations in flight
        self._waited = True  # True if no operation is in flight that was not waited for

    # -- tensors ---------------------------------------------------------------------------------

    def _groups(self) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
        """Look up the tensors, and return groups of parameters and of buffers, one per bucket."""
        parameters = (t for t in self._find_parameters() if t.numel())
        buffers = (t for t in self._find_buffers() if t.numel())
        limit = self._bucket_bytes
        return group_tensors(parameters, limit), group_tensors(buffers, limit)

    def _make_buckets(self, *, share_bucket: bool) -> None:
        parameters, buffers = self._groups()
        if share_bucket and len(buffers) == 1:
            first = buffers[0][0]
            alike = [
                i
                for i, group in enumerate(parameters)
                if (group[0].dtype, group[0].device) == (first.dtype, first.device)
            ]
            if alike and sum(b.nbytes for b in buffers[0]) <= _SHARED_BYTES:
                self._shared = alike[-1]
        shared = buffers.pop() if self._shared is not None else []
        self.parameter_buckets = len(parameters)
        self.buckets = [
            PartBucket(group, shared if i == self._shared else [])
            for i, group in enumerate(parameters)
        ]
        self.buckets += [PartBucket([], group) for group in buffers]

    def _refresh_tensors(self) -> None:
        """Look up the tensors again, because modules may have been moved."""
        parameters, buffers = self._groups()
        shared = buffers.pop() if self._shared is not None else []
        for i, (bucket, group) in enumerate(
            zip(self.buckets, [*parameters, *buffers], strict=True)
        ):
            if i < self.parameter_buckets:
                bucket.replace(group, shared if i == self._shared else [])
            else:
                bucket.replace([], group)

    def squared_norm(self) -> float:
        """Return ‖x‖² of the parameters of this part."""
        self._refresh_tensors()
        return squared_norm(p.detach() for b in self.buckets for p in b.parameters)

    def weights(self) -> tuple[float, float]:
        """Return w of this worker and Σ w of the last launch. Waits for Σ w."""
        return self._own_weight, self._total.wait()

    # -- launch and landing ----------------------------------------------------------------------

    @abstractmethod
    def launch(
        self,
        total: Handle[float],
        *,
        weight: float,
        step: int,
        what: str,
        buffer_weight: float | None = None,
        precision: Precision | None = None,
        outer_step: Handle[tuple[float, float]] | None = None,
    ) -> None:
        """Take a snapshot and start the sums. Never waits for ``total`` or ``outer_step``.

        Args:
            total: Σ w over the workers.
            weight: w of this worker. 0 sends zeros.
            step: Number of local steps so far.
            what: Name of the operations in errors.
            buffer_weight: w for the buffers. None: ``weight``. A worker that counts in ``total``
                must send its buffers, even if its update is 0, because buffers are averaged.
            precision: Precision of the parameters. None: that of the wire. Requires an
                ``UpdatePart``.
            outer_step: μ and a of this launch. None: ``outer.momentum`` for both. Requires an
                ``UpdatePart``.
        """

    def _begin(self, total: Handle[float], weight: float, step: int) -> None:
        # Two launches in flight would both contain the same local steps.
        assert not self.in_flight, "a part must land before it is launched again"
        self._refresh_tensors()
        self._total, self._own_weight, self._handles, self._waited = total, weight, [], False
        self.in_flight, self.launched_step = True, step
        self.launched_seconds, self.arrived_seconds = self._team.host.now(), None

    def arrived(self) -> bool:
        """Return True if ``land`` would not wait. Never blocks."""
        if self.in_flight and self.arrived_seconds is None:
            self._wire.advance()
            # Operations usually finish in order, so the last one is checked first.
            if all(handle.done() for handle in reversed(self._handles)):
                self.arrived_seconds = self._team.host.now()
        return self.in_flight and self.arrived_seconds is not None

    @abstractmethod
    def wait(self) -> None:
        """Wait until everything in flight has arrived. Does not land it."""

    def land(self, step: int, *, extra: Sequence[Landing] = ()) -> None:
        """Wait for the sums, then move P and the model.

        If a sum fails, P and the model do not change.

        Args:
            step: Number of local steps so far.
            extra: Further sums to land together with this part.
        """
        assert self.in_flight, "a part that was not launched cannot land"
        self.wait()
        land(extra, self._team.host)
        self.in_flight = False
        if self.weight:
            self._write(moved=step > self.launched_step, show=False)

    def discard(self) -> None:
        """Wait for the sums in flight, and leave the model unchanged. Only if P is not stored."""
        assert not self.keeps_base, "P must move in the same way on all workers"
        self.wait()
        self.in_flight = False

    def show(self, step: int) -> None:
        """Change the model as if the part had landed. P and the sums in flight do not change.

        For a consensus, after which the caller restores the model.
        """
        if self.in_flight:
            self.wait()
            if self.weight:
                self._write(moved=step > self.launched_step, show=True)

    @abstractmethod
    def _write(self, *, moved: bool, show: bool) -> None:
        """Move P and the model, after everything has arrived.

        Args:
            moved: True if the worker has taken steps since the launch, which are kept.
            show: True if P, v and the sums must not change.
        """

    def restore(self, step: int) -> None:
        """x ← P. Discard the local steps, except those that were sent.

        A launch in flight is corrected, so that the model equals P after its landing, too. Buffers
        become those of the last landing.

        Args:
            step: Number of local steps so far.
        """
        assert self.keeps_base, "P is not stored"
        self._refresh_tensors()
        for i, base in enumerate(self.base):
            unpack(base, self.buckets[i].parameters)
            self._restored(i)
        for i, buffers in enumerate(self.buffer_base):
            unpack(buffers, self.buckets[i].buffers)
            self._restored_buffers(i)
        self.synced_step = step

    def _restored(self, index: int) -> None:  # noqa: B027
        """Correct the launch in flight after x ← P in bucket ``index``."""

    def _restored_buffers(self, index: int) -> None:  # noqa: B027
        """Correct the launch in flight after the buffers of bucket ``index`` were restored."""

    def _write_buffers(self, index: int, sent: Tensor | None, *, show: bool) -> None:
        """Replace the buffers of bucket ``index``; see ``PartBucket.write_buffers``.

        Args:
            index: Index of the bucket.
            sent: Buffers that this worker has sent, if it has taken steps since. Else None.
            show: True if ``buffer_base`` must not change.
        """
        bucket = self.buckets[index]
        bucket.write_buffers(sent, self.weight)
        if bucket.buffers and self.buffer_base and not show:
            torch.div(bucket.buffer_values, self.weight, out=self.buffer_base[index])

    def before_save(self) -> None:
        """Wait for the sums in flight, and store them in ``sums`` for a checkpoint."""
        self.wait()

    def after_load(self) -> None:  # noqa: B027
        """Continue from the fields that were loaded from a checkpoint."""

    def release(self) -> None:
        """Free the staging tensors, unless they are in use.

        They are in use while the part is in flight, and in a part that stores its ``sums`` there.
        """
        if not self.in_flight and not self.sums:
            for bucket in self.buckets:
                bucket.release()
