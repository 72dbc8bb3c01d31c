"""A part of the shared model, from its launch to its landing: what all kinds of parts do.

``SnapshotPart`` sends a worker's tensors, or their difference to P, and leaves the quantization
error to the wire. ``UpdatePart`` keeps it in the model.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offbeat.averaging.buckets import BUCKET_BYTES, group_tensors, make_buckets, unpack
from offbeat.averaging.norm import squared_norm
from offbeat.averaging.parts.landing import Landing, land
from offbeat.averaging.parts.part_bucket import PartBucket
from offbeat.checkpoint.state import transient
from offbeat.quantization.wire import Precision, Wire
from offbeat.strategies.base import Outer
from offbeat.transport.handle import Completed, Handle
from offbeat.transport.team import Team

_RIDING_BYTES = 2**20  # buffers of at most this size share a message with parameters

Tensors = Callable[[], Sequence[Tensor]]
"""Returns tensors. Asked at each launch, because modules may rebind their buffers or be moved."""


@dataclass(init=False, eq=False)
class Part(ABC):
    """A part of the shared model P on one worker.

    Args:
        team: The workers.
        wire: Sums the parameters.
        parameters: Parameters of this part, or views into some.
        name: Name of the part in errors and in the streams of the wire; unique.
        buffers: Floating-point buffers that travel with this part. They are averaged exactly.
        outer: The step of P.
        step: Local steps so far.

    Attributes:
        base: P, one flat tensor for each bucket of parameters; empty where P is not kept.
        velocity: v, likewise; empty without outer momentum.
        buffer_base: The buffers at the last landing, one flat tensor for each bucket; empty where P
            is not kept.
        sums: The sums, one flat tensor a bucket. Saved in checkpoints.
        own: What this worker has sent, likewise.
        in_flight: True from the launch to the landing.
        weight: Σ w over the workers, once it is known.
        launched_step: Local step of the last launch.
        synced_step: Local step up to which the other workers have this worker's steps.
        launched_seconds: Time of the last launch on this worker's clock.
        arrived_seconds: Time at which it was seen to have arrived; None before.
        buckets: Buckets of parameters, then buckets of buffers alone.
        keeps_base: True if P is kept on this worker, so that ``restore`` is possible.
        sent_squared: ‖u‖² of the last landing; measured by parts with error feedback.
        mean_squared: ‖D‖² of the last landing; likewise.
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
        riding: bool = False,
    ) -> None:
        self._team, self._wire, self._name = team, wire, name
        self._bucket_bytes = BUCKET_BYTES / team.host.scale
        self._outer = Outer() if outer is None else outer
        self._find_parameters, self._find_buffers = parameters, buffers
        self._riding: int | None = None  # the bucket of parameters that the buffers share
        self._make_buckets(may_ride=riding)
        self.base, self.velocity, self.buffer_base = [], [], []
        self.sums, self.own = [], []
        self.keeps_base, self.sent_squared, self.mean_squared = False, 0.0, 0.0
        self.in_flight, self.weight = False, 0.0
        self.launched_step = self.synced_step = step
        self.launched_seconds, self.arrived_seconds = 0.0, None
        self._total: Handle[float] = Completed(0.0)
        self._own_weight = 0.0
        self._handles: list[Handle[Any]] = []  # of what is in flight
        self._waited = True  # everything in flight was waited for

    # -- tensors ---------------------------------------------------------------------------------

    def _make_buckets(self, *, may_ride: bool) -> None:
        limit = self._bucket_bytes
        parameters = [[*b.tensors] for b in make_buckets(self._find_parameters(), limit)]
        buffers = [[*b.tensors] for b in make_buckets(self._find_buffers(), limit)]
        if may_ride and len(buffers) == 1:
            first = buffers[0][0]
            alike = [
                i
                for i, group in enumerate(parameters)
                if (group[0].dtype, group[0].device) == (first.dtype, first.device)
            ]
            if alike and sum(b.nbytes for b in buffers[0]) <= _RIDING_BYTES:
                self._riding = alike[-1]
        shared = buffers.pop() if self._riding is not None else []
        self.parameter_buckets = len(parameters)
        self.buckets = [
            PartBucket(group, shared if i == self._riding else [])
            for i, group in enumerate(parameters)
        ]
        self.buckets += [PartBucket([], group) for group in buffers]

    def _refresh_tensors(self) -> None:
        """Find the tensors again, which may have been rebound or moved."""
        limit = self._bucket_bytes
        parameters = group_tensors((t for t in self._find_parameters() if t.numel()), limit)
        buffers = group_tensors((t for t in self._find_buffers() if t.numel()), limit)
        shared = buffers.pop() if self._riding is not None else []
        for i, (bucket, group) in enumerate(
            zip(self.buckets, [*parameters, *buffers], strict=True)
        ):
            if i < self.parameter_buckets:
                bucket.find(group, shared if i == self._riding else [])
            else:
                bucket.find([], group)

    def squared_norm(self) -> float:
        """‖x‖² of the parameters of this part. Reads them once."""
        self._refresh_tensors()
        return squared_norm(p.detach() for b in self.buckets for p in b.parameters)

    def weights(self) -> tuple[float, float]:
        """w of this worker and Σ w, of the last launch. Waits for the latter."""
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
            step: Local steps so far.
            what: Names the operations in errors.
            buffer_weight: w for the buffers. None: ``weight``. They are averaged, so a worker that
                counts in ``total`` must send them, even if its update is 0.
            precision: Precision of the parameters. None: that of the wire. Requires error feedback.
            outer_step: μ and a of this launch. None: ``outer.momentum`` for both. Likewise.
        """

    def _begin(self, total: Handle[float], weight: float, step: int) -> None:
        # Two launches of the same numbers would each correct the same disagreement.
        assert not self.in_flight, "a part must land before it is launched again"
        self._refresh_tensors()
        self._total, self._own_weight, self._handles, self._waited = total, weight, [], False
        self.in_flight, self.launched_step = True, step
        self.launched_seconds, self.arrived_seconds = self._team.host.now(), None

    def arrived(self) -> bool:
        """Whether ``land`` would not wait. Never blocks."""
        if self.in_flight and self.arrived_seconds is None:
            self._wire.advance()
            # The last one is asked first: mostly it answers for all.
            if all(handle.done() for handle in reversed(self._handles)):
                self.arrived_seconds = self._team.host.now()
        return self.in_flight and self.arrived_seconds is not None

    @abstractmethod
    def wait(self) -> None:
        """Wait until everything in flight has arrived. Does not land it."""

    def land(self, step: int, *, extra: Sequence[Landing] = ()) -> None:
        """Move P and the model. Waits; nothing is written before everything has arrived.

        Args:
            step: Local steps so far.
            extra: Further sums that land together with this part.
        """
        assert self.in_flight, "a part that was not launched cannot land"
        self.wait()
        land(extra, self._team.host)
        self.in_flight = False
        if self.weight:
            self._write(moved=step > self.launched_step, show=False)

    def discard(self) -> None:
        """Wait for what is in flight, and leave the model as it is. Only if P is not kept."""
        assert not self.keeps_base, "P must move in the same way on all workers"
        self.wait()
        self.in_flight = False

    def show(self, step: int) -> None:
        """Change the model as if the part had landed. P and what is in flight stay as they are."""
        if self.in_flight:
            self.wait()
            if self.weight:
                self._write(moved=step > self.launched_step, show=True)

    @abstractmethod
    def _write(self, *, moved: bool, show: bool) -> None:
        """Move P and the model, after everything has arrived.

        Args:
            moved: True if the worker has taken steps since the launch, which are kept.
            show: Leave P, v and the sums as they are.
        """

    def restore(self, step: int) -> None:
        """x ← P. The local steps are lost, except those that were sent.

        A launch in flight lands as if the worker had started from there. Buffers become those of
        the last landing.

        Args:
            step: Local steps so far.
        """
        assert self.keeps_base, "P is not kept"
        self._refresh_tensors()
        for i, base in enumerate(self.base):
            unpack(base, self.buckets[i].parameters)
            self._restored(i)
        for i, buffers in enumerate(self.buffer_base):
            unpack(buffers, self.buckets[i].buffers)
            self._restored_buffers(i)
        self.synced_step = step

    def _restored(self, index: int) -> None:  # noqa: B027
        """x ← P was done for bucket ``index``."""

    def _restored_buffers(self, index: int) -> None:  # noqa: B027
        """The buffers of bucket ``index`` were restored."""

    def _write_buffers(self, index: int, own: Tensor | None, *, show: bool) -> None:
        """Replace the buffers of bucket ``index`` by their mean, or shift them by it.

        Args:
            index: The bucket.
            own: What this worker has sent, if it has taken steps since; None if not.
            show: Leave ``buffer_base`` as it is.
        """
        bucket = self.buckets[index]
        bucket.write_buffers(own, self.weight)
        if bucket.buffers and self.buffer_base and not show:
            torch.div(bucket.buffer_values, self.weight, out=self.buffer_base[index])

    def before_save(self) -> None:
        """Wait for what is in flight, and hold it where a checkpoint finds it."""
        self.wait()

    def after_load(self) -> None:  # noqa: B027
        """The fields were loaded from a checkpoint."""

    def release(self) -> None:
        """Free the staging memory. Not while in flight, nor where it is the state of the part.

        A part that keeps local steps has its sums in the staging memory, which a checkpoint holds.
        """
        if not self.in_flight and not self.sums:
            for bucket in self.buckets:
                bucket.release()
