"""A part of the shared model, from its launch to its landing: the base class.

All workers hold the same shared model P, and each trains a local model x. A *part* is a group of
parameters that is averaged separately. To *launch* it, each worker sends its update u = x − P, and
the sum over the workers starts. The part is *in flight* until it *lands*: until P moves by a step
Δ, and x by Δ − u. Δ is the weighted mean update D = Σ w·u / Σ w, or an outer step along D. A worker
that contributes nothing, for example because it has taken no step, has the weight w = 0.
Floating-point buffers may be averaged together with a part.

The *wire* sums tensors over the workers, and may quantize them. Two subclasses differ in the place
of the quantization errors: in a ``SnapshotPart`` the wire stores them, in an ``UpdatePart`` they
stay in x. A ``SnapshotPart`` need not store P. It then sends x instead of u.
"""

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from offbeat.averaging.buckets import BUCKET_BYTES, group_tensors, unpack
from offbeat.averaging.norm import squared_norm
from offbeat.averaging.parts.landing import Landing, land
from offbeat.averaging.parts.part_bucket import PartBucket
from offbeat.quantization.wire import Precision, Wire
from offbeat.strategies.base import (
    Outer,
    transient,
)
from offbeat.transport.handle import Completed, Handle
from offbeat.transport.team import Team

_SHARED_BYTES = 2**20  # buffers of at most this total size share a message with parameters

Tensors = Callable[[], Sequence[Tensor]]
"""Function that returns the present tensors, because a module may replace its tensors."""


@dataclass(init=False, eq=False)
class Part(ABC):
    """A part of the shared model P on one worker.

    Args:
        team: The workers.
        wire: Sums the parameters over the workers.
        parameters: Function that returns the parameters of this part, or views into parameters.
        name: Unique name of the part. The wire stores quantization errors under this name.
        buffers: Function that returns the floating-point buffers to average with this part.
        outer: The outer step of P along D, which may have a momentum v. None: P ← P + D.
        step: Number of local steps so far.
        share_bucket: True if small buffers may share a bucket, and so a message, with parameters.

    Attributes:
        base: P, one flat tensor for each bucket of parameters. Empty if P is not stored.
        velocity: v, one flat tensor for each bucket of parameters. Empty without outer momentum.
        sums: Sums in flight, one flat tensor for each bucket. Valid after ``before_save``.
        own: This worker's values at the launch, one flat tensor for each bucket: a snapshot of x,
            or in an ``UpdatePart`` the sent u. Valid after ``before_save``.
        in_flight: True from the launch to the landing.
        weight: Σ w over the workers in the last launch, valid after ``wait``.
        launched_step: Local step of the last launch.
        synced_step: Newest local step whose change of x is synchronized, or undone by ``restore``.
        launched_seconds: Time of the last launch on this worker's clock.
        arrived_seconds: Time at which this worker found that the sums had arrived. None: not yet.
        buckets: Buckets that contain parameters, followed by buckets that contain only buffers.
        parameter_buckets: Number of buckets that contain parameters.
        keeps_base: True if this worker stores P, so that ``restore`` is possible.
        sent_squared: ‖u‖² of this worker at the last landing. 0 in a ``SnapshotPart``.
        mean_squared: ‖D‖² of the last landing. 0 in a ``SnapshotPart``.
    """

    most_buckets: ClassVar[float] = math.inf
    """Largest number of buckets, apart from rounding. A bucket costs many operations on a GPU."""
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
        share_bucket: bool = False,
    ) -> None:
        self._team, self._wire, self._name = team, wire, name
        part_bytes = sum(t.nbytes for t in parameters())
        self._bucket_bytes = max(BUCKET_BYTES, part_bytes / self.most_buckets)
        self._outer = Outer() if outer is None else outer
        self._find_parameters, self._find_buffers = parameters, buffers
        self._shared: int | None = None  # index of the bucket of parameters that contains buffers
        self._found: list[Tensor] = []  # tensors at the last call of ``_refresh_tensors``
        self._make_buckets(share_bucket=share_bucket)
        self.base, self.velocity = [], []
        self.sums, self.own = [], []
        self.keeps_base, self.sent_squared, self.mean_squared = False, 0.0, 0.0
        self.in_flight, self.weight = False, 0.0
        self.launched_step = self.synced_step = step
        self.launched_seconds, self.arrived_seconds = 0.0, None
        self._total: Handle[float] = Completed(0.0)
        self._own_weight = 0.0
        self._handles: list[Handle[Any]] = []  # operations in flight
        self._waited = True  # False from the launch until ``wait`` has ended

    # -- tensors ---------------------------------------------------------------------------------

    def _groups(self) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
        """Return the present parameters and the present buffers, in one group for each bucket."""
        parameters = (t for t in self._find_parameters() if t.numel())
        buffers = (t for t in self._find_buffers() if t.numel())
        limit = self._bucket_bytes
        return group_tensors(parameters, limit), group_tensors(buffers, limit)

    def _make_buckets(self, *, share_bucket: bool) -> None:
        parameters, buffers = self._groups()
        if share_bucket and len(buffers) == 1:
            first = buffers[0][0]
            compatible = [
                i
                for i, group in enumerate(parameters)
                if (group[0].dtype, group[0].device) == (first.dtype, first.device)
            ]
            if compatible and sum(b.nbytes for b in buffers[0]) <= _SHARED_BYTES:
                self._shared = compatible[-1]
        shared = buffers.pop() if self._shared is not None else []
        self.parameter_buckets = len(parameters)
        self.buckets = [
            PartBucket(group, shared if i == self._shared else [])
            for i, group in enumerate(parameters)
        ]
        self.buckets += [PartBucket([], group) for group in buffers]

    def _refresh_tensors(self) -> None:
        """Look up the tensors again, because a module may have been moved."""
        found = [*self._find_parameters(), *self._find_buffers()]
        if len(found) == len(self._found) and all(map(operator.is_, found, self._found)):
            return
        self._found = found
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
        """Return ‖x‖² of this part, without buffers."""
        self._refresh_tensors()
        with torch.no_grad():
            return squared_norm(p for bucket in self.buckets for p in bucket.parameters)

    def weights(self) -> tuple[float, float]:
        """Return this worker's w and the sum Σ w of the last launch. Waits for the sum."""
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
        """Start the sums over the workers. Never waits for ``total`` or ``outer_step``.

        Args:
            total: Σ w over the workers, by which the sums of updates and buffers are divided.
            weight: w of this worker. With 0 the worker sends an update and buffers of 0.
            step: Number of local steps so far.
            what: Name of the operations in error messages.
            precision: Precision of the parameters in this launch, only for an ``UpdatePart``. None:
                the precision of the wire.
            outer_step: μ and a in the outer step v ← μ·v + D, P ← P + D + a·v, only for an
                ``UpdatePart``. None: both are ``outer.momentum``.
        """

    def _begin(self, total: Handle[float], weight: float, step: int) -> None:
        # Two launches of one part in flight at the same time would contain the same local steps.
        assert not self.in_flight, "a part must land before it is launched again"
        self._refresh_tensors()
        self._total, self._own_weight, self._handles, self._waited = total, weight, [], False
        self.in_flight, self.launched_step = True, step
        self.launched_seconds, self.arrived_seconds = self._team.host.now(), None

    def arrived(self) -> bool:
        """Return True if the part is in flight and its sums have arrived. Never blocks."""
        if not self.in_flight:
            return False
        # Operations usually finish in order, so the last one is the most likely to be missing.
        if self.arrived_seconds is None and all(h.done() for h in reversed(self._handles)):
            self.arrived_seconds = self._team.host.now()
        return self.arrived_seconds is not None

    def wait(self) -> None:
        """Wait until all sums of this part have arrived. P and the model do not change."""
        if self._waited:
            return
        self.weight = self._total.wait()
        self._receive()
        self._handles, self._waited = [], True
        if self.arrived_seconds is None:
            self.arrived_seconds = self._team.host.now()

    @abstractmethod
    def _receive(self) -> None:
        """Wait for the operations in flight, and store the results for ``_write``."""

    def land(self, step: int, *, extra: Sequence[Landing] = ()) -> None:
        """Wait for the sums, then move P and the model, unless Σ w is 0.

        If a sum fails, P and the model do not change. A ``step`` greater than that of the launch
        means that the model has changed since. ``extra`` are sums that land with this part.
        """
        assert self.in_flight, "a part that was not launched cannot land"
        self.wait()
        land(extra, self._team.host)
        self.in_flight = False
        if self.weight:
            self._write(moved=step > self.launched_step, show=False)

    def discard(self) -> None:
        """Wait for the sums in flight, and ignore them. Allowed only if P is not stored."""
        assert not self.keeps_base, "P must move in the same way on all workers"
        self.wait()
        self.in_flight = False

    def show(self, step: int) -> None:
        """Wait, then change the model as ``land`` would. P and the sums do not change.

        The caller restores the model afterwards.
        """
        if self.in_flight:
            self.wait()
            if self.weight:
                self._write(moved=step > self.launched_step, show=True)

    @abstractmethod
    def _write(self, *, moved: bool, show: bool) -> None:
        """Move P and the model, after all sums have arrived.

        Args:
            moved: True if the model has changed since the launch. The model keeps this change.
            show: True to change only the model. P, v and the sums do not change.
        """

    def restore(self, step: int) -> None:
        """x ← P. Local steps that were not sent are lost. The part must not be in flight.

        ``step`` is the number of local steps so far.
        """
        assert self.keeps_base
        assert not self.in_flight
        self._refresh_tensors()
        for base, bucket in zip(self.base, self.buckets, strict=False):
            unpack(base, bucket.parameters)
        self.synced_step = step

    def before_save(self) -> None:
        """Wait for the sums in flight, and make ``sums`` and ``own`` valid for a checkpoint."""
        self.wait()

    def after_load(self) -> None:  # noqa: B027
        """Continue from the fields that were loaded from a checkpoint."""

    def release(self) -> None:
        """Free the buckets' flat tensors, unless the part is in flight or ``sums`` holds them."""
        if not self.in_flight and not self.sums:
            for bucket in self.buckets:
                bucket.release()
