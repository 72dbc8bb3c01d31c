"""A part of the model whose workers send snapshots of their tensors.

``part.py`` explains the terms.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from offbeat.averaging.buckets import add_to, unpack
from offbeat.averaging.parts.landing import Landing, bucket_landing, land
from offbeat.averaging.parts.part import Part, Tensors
from offbeat.quantization.wire import Precision, Wire
from offbeat.transport.handle import Handle
from offbeat.transport.team import Team


class SnapshotPart(Part):
    """A part whose workers send snapshots of the model, minus P if P is stored.

    s is the snapshot of a worker at the launch, and w the weight of the worker. The outer step of P
    has the learning rate η and the Nesterov momentum μ:

        P stored:    D = Σ w·(s − P) / Σ w;  v ← μ·v + D;  P ← P + η·(D + μ·v)
        otherwise:   P = Σ w·s / Σ w         the same as above with η = 1, μ = 0
        landing:     x ← x + (P − s)         keeps the local steps since the launch
                     x ← P                   if there are no local steps since the launch

    Floating-point buffers are averaged, too. If they have changed since the launch, they keep the
    change as in ``add_clamped``.

    P is stored if there is an outer step, if the wire is lossy, or with ``anchored``. A lossy wire
    needs P because the quantization error of s − P is much smaller than that of s.

    Args:
        anchored: True to store P in any case.
        keeps_steps: False if the part always lands before the worker's next step.

    The other arguments are those of ``Part``.

    *Memory*, in copies of the part: one for the sums, one for s with ``keeps_steps``, one for P
    if stored, and one for v with an outer momentum.
    """

    def __init__(
        self,
        team: Team,
        wire: Wire,
        parameters: Tensors,
        *,
        anchored: bool = False,
        keeps_steps: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(team, wire, parameters, share_bucket=wire.exact, **options)
        self._keeps_steps = keeps_steps
        dtype = None if self._outer.dtype is None else getattr(torch, self._outer.dtype)
        self.keeps_base = anchored or not self._outer.plain or not wire.exact
        if self.keeps_base:
            self.base = [b.copy_parameters(dtype) for b in self.buckets[: self.parameter_buckets]]
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
        assert precision is None, "a precision of one launch requires error feedback"
        assert outer_step is None, "an outer step of one launch requires error feedback"
        assert weight in (0, 1) or not self.keeps_base, (
            "a weighted mean of differences is not defined"
        )
        self._begin(total, weight, step)
        for i, bucket in enumerate(self.buckets):
            flat = bucket.pack(weight or 1.0)
            if self.own:
                self.own[i].copy_(flat)
            if not weight:
                flat.zero_()
            if i >= self.parameter_buckets:
                self._handles.append(self._team.communicator.sum(flat, what=what))
                continue
            if weight and self.base:
                values = bucket.parameter_values
                torch.sub(values, self.base[i], out=values)
            stream = f"{self._name}, bucket {i}"
            self._handles.append(
                self._wire.sum(flat, stream=stream, what=what, contribute=weight != 0)
            )

    @override
    def _receive(self) -> None:
        for bucket, handle in zip(self.buckets, self._handles, strict=True):
            bucket.flat.copy_(handle.wait())

    @override
    def land(self, step: int, *, extra: Sequence[Landing] = ()) -> None:
        if self.keeps_base or self._keeps_steps:
            super().land(step, extra=extra)
            return
        self.weight = self._total.wait()
        landings = list(self._plain_landings())
        land([*landings, *extra], self._team.host)
        self._handles, self._waited, self.in_flight = [], True, False
        self.arrived_seconds = self._team.host.now()

    def _plain_landings(self) -> Iterator[Landing]:
        """Yield the landings x ← Σ w·s / Σ w. If Σ w = 0, they write nothing."""
        for handle, bucket in zip(self._handles, self.buckets, strict=True):
            if self.weight:
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
            bucket.write_buffers(None if own is None else bucket.buffers_of(own), self.weight)

    def _write_parameters(self, i: int, own: Tensor | None, show: bool) -> None:
        bucket = self.buckets[i]
        values = bucket.parameter_values
        if own is not None:
            own = bucket.parameters_of(own)
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
        """Move P and v of bucket i, and return P. With ``show`` the stored values do not change."""
        old, flat = self.base[i], self.buckets[i].parameter_values
        dtype = torch.promote_types(old.dtype, flat.dtype)
        mean = flat.to(dtype, copy=True).mul_(1 / self.weight)  # D
        if self.velocity:
            velocity = self.velocity[i].to(dtype, copy=True).mul_(self._outer.momentum).add_(mean)
            if not show:
                self.velocity[i].copy_(velocity)
            mean.add_(velocity, alpha=self._outer.momentum)
        base = old.to(dtype, copy=True).add_(mean, alpha=self._outer.lr)
        return base.to(old.dtype) if show else old.copy_(base)
