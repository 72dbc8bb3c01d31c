"""A part of the shared model, from its launch to its landing.

``Part`` is what every part does. ``SnapshotPart`` sends a worker's tensors, or their difference to
P, and keeps the quantization error in the wire; ``update_part`` has the kind that keeps it in the
model.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from offbeat.averaging.landing import Landing, bucket_landing, land
from offbeat.averaging.norm import squared_norm
from offbeat.averaging.replica import (
    Bucket,
    add_clamped,
    add_to,
    group_tensors,
    make_buckets,
    unpack,
)
from offbeat.checkpoint import transient
from offbeat.fabric import Completed, Handle, Team, Wire
from offbeat.fabric.wire import Precision
from offbeat.strategies.base import Outer

_RIDING_BYTES = 2**20  # buffers of at most this size share a message with parameters

Tensors = Callable[[], Sequence[Tensor]]
"""Returns tensors. Asked at each launch, because modules may rebind their buffers or be moved."""


class PartBucket(Bucket):
    """A bucket whose first tensors are parameters and the others floating-point buffers.

    Args:
        parameters: Parameters, of one dtype and device.
        buffers: Buffers, of the same dtype and device.
    """

    def __init__(self, parameters: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
        super().__init__([*parameters, *buffers])
        self.parameters, self.buffers = list(parameters), list(buffers)
        self.split = self.elements - sum(elements_of(b) for b in buffers)

    def find(self, parameters: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
        """Use these tensors, of the same shapes, from now on."""
        self.parameters, self.buffers = list(parameters), list(buffers)
        self.tensors = [*parameters, *buffers]

    @property
    def parameter_values(self) -> Tensor:
        """The staged values of the parameters."""
        return self.flat[: self.split]

    @property
    def buffer_values(self) -> Tensor:
        """The staged values of the buffers."""
        return self.flat[self.split :]


def elements_of(tensor: Tensor) -> int:
    """Number of real numbers in ``tensor``."""
    return tensor.numel() * (2 if tensor.is_complex() else 1)


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
        self._outer = Outer() if outer is None else outer
        self._find_parameters, self._find_buffers = parameters, buffers
        self._riding: int | None = None  # the bucket of parameters that the buffers share
        self._make_buckets(may_ride=riding)
        self.base, self.velocity, self.sums, self.own = [], [], [], []
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
        parameters = [[*b.tensors] for b in make_buckets(self._find_parameters())]
        buffers = [[*b.tensors] for b in make_buckets(self._find_buffers())]
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
        parameters = group_tensors(t for t in self._find_parameters() if t.numel())
        buffers = group_tensors(t for t in self._find_buffers() if t.numel())
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
        precision: Precision | None = None,
        outer_step: Handle[tuple[float, float]] | None = None,
    ) -> None:
        """Take a snapshot and start the sums. Never waits for ``total`` or ``outer_step``.

        Args:
            total: Σ w over the workers.
            weight: w of this worker. 0 sends zeros.
            step: Local steps so far.
            what: Names the operations in errors.
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

        A launch in flight lands as if the worker had started from there. P of buffers is not kept:
        NaN in a buffer becomes 0, and the next landing replaces it by the mean.

        Args:
            step: Local steps so far.
        """
        assert self.keeps_base, "P is not kept"
        self._refresh_tensors()
        for i, base in enumerate(self.base):
            unpack(base, self.buckets[i].parameters)
            self._restored(i)
        for bucket in self.buckets:
            for buffer in bucket.buffers:
                buffer.masked_fill_(buffer.isnan(), 0.0)  # ∞ may be intended, as in a mask
        self.synced_step = step

    def _restored(self, index: int) -> None:  # noqa: B027
        """x ← P was done for bucket ``index``."""

    def before_save(self) -> None:
        """Wait for what is in flight, and hold it where a checkpoint finds it."""
        self.wait()

    def after_load(self) -> None:  # noqa: B027
        """The fields were loaded from a checkpoint."""

    def release(self) -> None:
        """Free the staging memory, if nothing is in flight."""
        if not self.in_flight and not self.sums:
            for bucket in self.buckets:
                bucket.release()


def write_buffers(bucket: PartBucket, own: Tensor | None, weight: float) -> None:
    """Replace buffers by their mean, or shift them by it.

    Args:
        bucket: Holds the sum in ``buffer_values``.
        own: What this worker has sent, if it has taken steps since; None if not.
        weight: Σ w.
    """
    if not bucket.buffers:
        return
    if own is None:
        unpack(bucket.buffer_values, bucket.buffers, weight)
    else:
        add_clamped(bucket.buffers, bucket.buffer_values / weight, own)


class SnapshotPart(Part):
    """A part whose workers send snapshots, or over a lossy wire the difference of these to P.

    s is the snapshot of a worker at the launch, w its weight:

        P kept:      D = Σ w·(s − P) / Σ w;  v ← μ·v + D;  P ← P + η·(D + μ·v)
        P not kept:  P = Σ w·s / Σ w         the same for η = 1, μ = 0
        landing:     x ← x + (P − s)         keeps the local steps since the launch
                     x ← P                   if there are none

    Floating-point buffers are averaged. If steps were taken since the launch they are shifted by
    the same difference, but stay between their own value and the mean, so that a variance stays
    positive.

    Args:
        team: As for ``Part``, like those below.
        wire: With a lossy one P is kept, because quantization is relative to what is sent.
        parameters: Tensors of this part.
        name: Name of the part.
        anchored: Keep P. Always kept with an outer step or a lossy wire.
        keeps_steps: False if the part always lands before the worker's next step.
        outer: The step of P.
        buffers: Buffers that travel along.
        step: Local steps so far.

    *Memory*, in copies of the part: the sums; s with ``keeps_steps``; P, if kept; v.
    """

    def __init__(
        self,
        team: Team,
        wire: Wire,
        parameters: Tensors,
        *,
        name: str,
        anchored: bool = False,
        keeps_steps: bool = True,
        outer: Outer | None = None,
        buffers: Tensors = tuple,
        step: int = 0,
    ) -> None:
        super().__init__(
            team,
            wire,
            parameters,
            name=name,
            buffers=buffers,
            outer=outer,
            step=step,
            riding=wire.exact,
        )
        self._keeps_steps = keeps_steps
        dtype = None if self._outer.dtype is None else getattr(torch, self._outer.dtype)
        self.keeps_base = anchored or not self._outer.plain or not wire.exact
        if self.keeps_base:
            self.base = [_copy(b, dtype) for b in self.buckets[: self.parameter_buckets]]
        if self._outer.momentum:
            self.velocity = [torch.zeros_like(p) for p in self.base]
        if keeps_steps:
            self.sums = [b.flat for b in self.buckets]
            self.own = [torch.empty_like(s) for s in self.sums]

    @override
    def launch(
        self,
        total: Handle[float],
        *,
        weight: float,
        step: int,
        what: str,
        precision: Precision | None = None,
        outer_step: Handle[tuple[float, float]] | None = None,
    ) -> None:
        assert precision is None and outer_step is None, "they require error feedback"
        assert weight in (0, 1) or not self.keeps_base, "a weighted mean of differences is not defined"
        self._begin(total, weight, step)
        for i, bucket in enumerate(self.buckets):
            flat = bucket.pack(weight if weight else 1.0)
            if self.own:
                self.own[i].copy_(flat)
            if not weight:
                flat.zero_()
            if i >= self.parameter_buckets:
                self._handles.append(self._team.fabric.sum(flat, what=what))
                continue
            if weight and self.base:
                values = bucket.parameter_values
                torch.sub(values, self.base[i], out=values)
            stream = f"{self._name}, bucket {i}"
            self._handles.append(
                self._wire.sum(flat, stream=stream, what=what, contribute=weight != 0)
            )

    @override
    def wait(self) -> None:
        if self._waited:
            return
        self.weight = self._total.wait()
        for bucket, handle in zip(self.buckets, self._handles, strict=True):
            bucket.flat.copy_(handle.wait())
        self._handles, self._waited = [], True
        if self.arrived_seconds is None:
            self.arrived_seconds = self._team.host.now()

    @override
    def land(self, step: int, *, take: bool = True, extra: Sequence[Landing] = ()) -> None:
        """Move P and the model; see ``Part.land``.

        Args:
            step: Local steps so far.
            take: False keeps this worker's own model, which has contributed to the mean.
            extra: Further sums that land together with this part.
        """
        if self.keeps_base or self._keeps_steps:
            super().land(step, extra=extra)
            return
        self.weight = self._total.wait()
        landings = list(self._plain_landings(take))
        land([*landings, *extra], self._team.host)
        self._handles, self._waited, self.in_flight = [], True, False
        self.arrived_seconds = self._team.host.now()

    def _plain_landings(self, take: bool) -> Iterator[Landing]:
        """x ← Σ w·s / Σ w, bucket by bucket as they arrive."""
        for handle, bucket in zip(self._handles, self.buckets, strict=True):
            if take and self.weight:
                yield bucket_landing(handle, bucket, self.weight)
            else:
                yield Landing(handle, write=lambda: None)

    @override
    def _write(self, *, moved: bool, show: bool) -> None:
        moved = moved and bool(self.own)
        self._refresh_tensors()
        for i, bucket in enumerate(self.buckets):
            own = self.own[i] if moved else None
            if i < self.parameter_buckets:
                self._write_parameters(i, own, show)
            write_buffers(bucket, None if own is None else own[bucket.split :], self.weight)

    def _write_parameters(self, i: int, own: Tensor | None, show: bool) -> None:
        bucket = self.buckets[i]
        values = bucket.parameter_values
        if own is not None:
            own = own[: bucket.split]
        if not self.base:
            if own is None:
                unpack(values, bucket.parameters, self.weight)
                return
            shift = values.clone() if show else values
            shift.sub_(own, alpha=self.weight)
            add_to(bucket.parameters, shift, 1 / self.weight)
            return
        base = self._moved_base(i, show)
        if own is None:
            unpack(base, bucket.parameters)
        else:
            add_to(bucket.parameters, (base - own).to(values.dtype), 1.0)

    def _moved_base(self, i: int, show: bool) -> Tensor:
        """P of bucket i after its outer step; with ``show`` P and v stay as they are."""
        kept, flat = self.base[i], self.buckets[i].parameter_values
        dtype = torch.promote_types(kept.dtype, flat.dtype)
        mean = flat.to(dtype, copy=True).div_(self.weight)  # D
        if self.velocity:
            velocity = self.velocity[i].to(dtype, copy=True).mul_(self._outer.momentum).add_(mean)
            if not show:
                self.velocity[i].copy_(velocity)
            mean.add_(velocity, alpha=self._outer.momentum)
        base = kept.to(dtype, copy=True).add_(mean, alpha=self._outer.lr)
        return base.to(kept.dtype) if show else kept.copy_(base)

    @override
    def _restored(self, index: int) -> None:
        if self.own:
            self.own[index][: self.buckets[index].split].copy_(self.base[index])


def _copy(bucket: Bucket, dtype: torch.dtype | None) -> Tensor:
    flat = bucket.pack()
    copy = flat.to(dtype or flat.dtype, copy=True)
    return copy[: bucket.split] if isinstance(bucket, PartBucket) else copy
