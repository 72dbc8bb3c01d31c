"""A mean under way while the worker goes on: of a whole model or of a part that flies by itself.

Each part is launched, arrives, and lands; several may be under way at once, each with sums, codecs
and an outer step of its own. ``AsyncAveraging`` has one part, ``DiLoCo`` one a fragment.
The file is long because a launch, its landing and its checkpoint must agree on every tensor.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offbeat.checkpoint import transient
from offbeat.fabric import Completed, Handle, Team, Wire
from offbeat.fabric.codec import compiled, piece_elements
from offbeat.fabric.numbers import Numbers, Packed, Plain, Update
from offbeat.fabric.wire import Precision
from offbeat.kernels import Kernels
from offbeat.means.replica import (
    BUCKET_BYTES,
    Bucket,
    add_clamped,
    add_to,
    as_real,
    group_tensors,
    make_buckets,
    staging_dtype,
    unpack,
)
from offbeat.means.run import Difference, Run
from offbeat.significance import squared_norm

Squares = NDArray[np.float64]  # ‖D‖² and ‖u‖²


@dataclass(frozen=True)
class Outer:
    """A step of the shared model along the mean update D (Nesterov momentum).

        v ← μ·v + D
        P ← P + η·(D + μ·v)

    Attributes:
        lr: η.
        momentum: μ; with 0 there is no v.
    """

    lr: float = 1.0
    momentum: float = 0.0

    @property
    def plain(self) -> bool:
        """Whether it is P ← P + D."""
        return (self.lr, self.momentum) == (1.0, 0.0)


@dataclass(init=False, eq=False)
class InFlight:
    """The mean of some of the model's tensors, from its launch to its landing.

    s is this worker's snapshot at the launch, P what all workers hold in common, w 1 for a worker
    that contributes, else 0:

        anchored:      D = Σ w·(s − P) / Σ w;  v ← μ·v + D;  P ← P + η·(D + μ·v)
        not anchored:  P ← Σ w·s / Σ w         P is not kept; that is the same for η = 1, μ = 0
        landing:       x ← x + (P − s)         the own steps since the launch stay
                       x ← P                   if there are none
        residual kept: u = C(s − P) travels;    D = Σ w·u / Σ w;  Δ = η·(D + a·v)
                       P ← P + Δ;  x ← x + Δ − u

    Where the residual is kept, what the codec C rounds away stays in the model, which is all the
    error feedback there is: x − P shrinks by exactly u. There μ and a may be given with each
    launch; a is μ otherwise.

    Floating-point buffers that fly along are averaged exactly, and their shift is kept between
    their own value and the mean, so that a variance stays positive. Of integer ones the maximum is
    taken.

    Args:
        team: The workers.
        wire: Sums the parameters.
        tensors: The parameters of this part, or what gives them.
        name: Names the streams of the wire; another one for each part.
        anchored: Keep P. Always so with an outer step, and over a lossy wire, where rounding is
            relative to what is sent.
        outer: How P moves.
        dtype: Of P and v; None is that in which the parameters are summed.
        keeps_steps: False: it always lands before the worker's next step, so s is not kept.
        keeps_residual: What rounding takes from an update stays in the model.
        buffers: Gives the floating-point buffers that fly along; asked each time, because modules
            rebind theirs.
        integers: Gives the integer buffers that do.
        step: Own steps so far.

    *Memory*, in copies of the part: the sums; s, if steps are kept; P, if anchored; v. Where the
    residual is kept: P, v and, while it flies, u and the sums as they travel. Neither the snapshot
    nor Δ is ever there as a whole.
    """

    base: list[Tensor]  # P, one a bucket of parameters; empty if not anchored
    velocity: list[Tensor]  # v, likewise; with outer momentum
    sums: list[
        Tensor
    ]  # Σ w·(s − P), or Σ w·s, one a bucket; kept in checkpoints while they may fly
    own: list[Tensor]  # s, likewise
    largest: list[Tensor]  # the maximum of the integer buffers: one tensor, or none
    flying: bool  # launched and not yet landed
    weight: float  # Σ w, once known
    launched_step: int  # own step of the last launch
    launched_seconds: float
    arrived_seconds: float | None
    fade: float  # μ of what is under way
    ahead: float  # a, likewise
    outer: Outer = transient()
    buckets: list[Bucket] = transient()
    parameter_buckets: int = transient()  # so many of them; the others hold buffers

    def __init__(
        self,
        team: Team,
        wire: Wire,
        tensors: Sequence[Tensor] | Callable[[], Sequence[Tensor]],
        *,
        name: str,
        anchored: bool = False,
        outer: Outer | None = None,
        dtype: torch.dtype | None = None,
        keeps_steps: bool = True,
        keeps_residual: bool = False,
        buffers: Callable[[], Sequence[Tensor]] = tuple,
        integers: Callable[[], Sequence[Tensor]] = tuple,
        step: int = 0,
    ) -> None:
        outer = Outer() if outer is None else outer
        anchored = anchored or keeps_residual or not outer.plain or not wire.exact
        self._team, self._wire, self._name = team, wire, name
        self._buffers, self._integers = buffers, integers
        self._outer, self._keeps_steps = outer, keeps_steps
        self._keeps_residual = keeps_residual
        self._parameters = tensors if callable(tensors) else None
        self._bucket_bytes = BUCKET_BYTES / team.host.scale
        parameters = make_buckets(tensors() if callable(tensors) else tensors, self._bucket_bytes)
        self.buckets = [*parameters, *make_buckets(buffers(), self._bucket_bytes)]
        self.parameter_buckets = len(parameters)
        self.base = [_copy(b, dtype) for b in parameters] if anchored else []
        if keeps_residual:
            for bucket in parameters:
                bucket.release()
        self.velocity = [torch.zeros_like(p) for p in self.base] if outer.momentum else []
        self.sums = [b.flat for b in self.buckets] if keeps_steps and not keeps_residual else []
        self.own = [torch.empty_like(s) for s in self.sums]
        elements = sum(t.numel() for t in integers())
        device = team.fabric.control_device
        empty = torch.empty(elements, dtype=torch.int64, device=device)
        self.largest = [empty] if elements else []
        self.flying, self.weight, self.launched_step = False, 0.0, step
        self.launched_seconds, self.arrived_seconds = 0.0, None
        self.fade = self.ahead = outer.momentum
        self._told = Completed((outer.momentum, outer.momentum))
        self._momentum: Handle[tuple[float, float]] = self._told
        self.mean_squared = self.sent_squared = 0.0
        self._total: Handle[float] = Completed(0.0)
        # What is under way, and the staging tensor that gets it; updates stay coded.
        self._handles: list[tuple[Tensor | None, Handle[Any]]] = []
        self._updates: list[Update] = []
        self._buffers_own: list[Tensor] = []  # s of the buffers, where ``own`` is not kept

    def launch(
        self,
        total: Handle[float],
        *,
        contribute: bool,
        step: int,
        what: str,
        precision: Precision | None = None,
        momentum: Handle[tuple[float, float]] | None = None,
    ) -> None:
        """Take the snapshot and start the sums.

        Args:
            total: Σ w over the workers; not waited for.
            contribute: Whether w is 1, else 0.
            step: Own steps so far.
            what: Names the operations in errors.
            precision: Of this flight, where the residual is kept; None is the wire's own. The same
                on all workers.
            momentum: μ and a of this flight, where the residual is kept; not waited for before it
                has arrived. None: as ``outer`` says.
        """
        assert precision is None or self._keeps_residual, "errors would be kept by the wire"
        # Two payloads over the same entries would put disagreement back with the opposite sign.
        assert not self.flying, "it must land before it is launched again"
        fabric = self._team.fabric
        self._find_tensors()
        self._updates, self._buffers_own = [], []
        self._momentum = self._told if momentum is None else momentum
        if self._keeps_residual:
            self.sums, self.own = [], []  # of a checkpoint
        for i, bucket in enumerate(self.buckets):
            parameters, stream = i < self.parameter_buckets, f"{self._name}, bucket {i}"
            if parameters and self._keeps_residual:
                update = self._wire.sum_updates(
                    Difference(Run(bucket.tensors), self.base[i]),
                    stream=stream,
                    what=what,
                    contribute=contribute,
                    precision=precision,
                )
                self._updates.append(update)
                self._handles.append((None, update))
                continue
            flat = bucket.pack()
            if self.own:
                self.own[i].copy_(flat)
            elif self._keeps_residual:
                self._buffers_own.append(flat.clone())
            if not contribute:
                flat.zero_()
            if not parameters:
                self._handles.append((flat, fabric.sum(flat, what=what)))
                continue
            if contribute and self.base:
                torch.sub(flat, self.base[i], out=flat)
            handle = self._wire.sum(flat, stream=stream, what=what, contribute=contribute)
            self._handles.append((flat, handle))
        for flat in self.largest:
            torch.cat([t.reshape(-1).to(flat) for t in self._integers()], out=flat)
            self._handles.append((flat, fabric.maximum(flat, what=what)))
        self._total, self.flying, self.launched_step = total, True, step
        self.launched_seconds, self.arrived_seconds = self._team.host.now(), None

    def finite(self) -> bool:
        """Whether no parameter of this part is NaN or infinite. Reads them once."""
        self._find_tensors()
        tensors = (t for b in self.buckets[: self.parameter_buckets] for t in b.tensors)
        return math.isfinite(squared_norm(t.detach() for t in tensors))

    def restore(self) -> None:
        """x ← P: this worker's own steps are lost; what it has sent of them stays sent.

        What is under way lands as if it had been launched from there. Of floating-point buffers
        there is no P: what is NaN in them becomes 0, and the mean when they land the next time.
        """
        assert self.base, "P is not kept"
        self._find_tensors()
        for i, base in enumerate(self.base):
            tensors = self.buckets[i].tensors
            unpack(base, tensors)
            if self.own:
                self.own[i].copy_(base)
            if self._keeps_residual and self.flying:  # it will be taken away
                run = Run(tensors)
                run.add(self._updates[i].sent.whole(), 0)
                run.write_back()
        for buffer in self._buffers():
            buffer.masked_fill_(buffer.isnan(), 0.0)  # infinity may be meant, as in a mask

    def arrived(self) -> bool:
        """Whether landing would not wait. Never blocks; asks one operation, mostly."""
        if self.flying and self.arrived_seconds is None:
            self._wire.advance()
            handles = [handle for _, handle in self._handles]
            if not handles or (handles[-1].done() and all(h.done() for h in handles)):
                self.arrived_seconds = self._team.host.now()
        return self.flying and self.arrived_seconds is not None

    def wait(self) -> None:
        """Let what is under way arrive, without landing it."""
        if not self.flying or not self._handles:
            return
        self.weight = self._total.wait()
        self.fade, self.ahead = self._momentum.wait()
        for flat, handle in self._handles:
            result = handle.wait()
            if flat is not None:
                flat.copy_(result)
        self._handles = []
        if self.arrived_seconds is None:
            self.arrived_seconds = self._team.host.now()

    def before_save(self) -> None:
        """Let it arrive, and keep what a checkpoint has to hold of it."""
        self.wait()
        if self._keeps_residual and self.flying:
            buffers = self.buckets[self.parameter_buckets :]
            self.sums = [one.wait().whole() for one in self._updates] + [b.flat for b in buffers]
            self.own = [*(one.sent.whole() for one in self._updates), *self._buffers_own]

    def after_load(self) -> None:
        """Take up what was under way."""
        if self._keeps_residual and self.flying:
            sums, own = (
                [one.to(b.tensors[0].device) for one, b in zip(some, self.buckets, strict=True)]
                for some in (self.sums, self.own)
            )
            count = self.parameter_buckets
            numbers = [(Plain(total), Plain(u)) for total, u in zip(sums, own, strict=True)]
            self._updates = [Update(Completed(total), u) for total, u in numbers[:count]]
            self._buffers_own = own[count:]
            for bucket, total in zip(self.buckets[count:], sums[count:], strict=True):
                bucket.flat.copy_(total)
        if self._keeps_residual:
            self.sums, self.own = [], []

    def land(self, step: int) -> bool:
        """Move P and the model; waits if it has not arrived. Nothing is written before all has.

        Args:
            step: Own steps so far.

        Returns:
            Whether there was anything to land.
        """
        if not self.flying:
            return False
        self.wait()
        self.flying, self.mean_squared, self.sent_squared = False, 0.0, 0.0
        if self.weight:
            self._apply(moved=step > self.launched_step)
        self._updates, self._buffers_own = [], []
        return True

    def show(self, step: int) -> None:
        """The model as if it had landed; what is under way stays so, and so does P."""
        if not self.flying:
            return
        self.wait()
        if self.weight:
            self._apply(moved=step > self.launched_step, show=True)

    def _apply(self, *, moved: bool, show: bool = False) -> None:
        moved = moved and bool(self.own or self._keeps_residual)
        self._find_tensors()
        for i, bucket in enumerate(self.buckets):
            if i >= self.parameter_buckets:
                self._apply_buffer(i, moved)
            elif self._keeps_residual:
                self._apply_update(i, show)
            elif not self.base:
                if moved:
                    shift = bucket.flat.clone() if show else bucket.flat
                    shift.sub_(self.own[i], alpha=self.weight)
                    add_to(bucket.tensors, shift, 1 / self.weight)
                else:
                    unpack(bucket.flat, bucket.tensors, self.weight)
            else:
                base = self._step(i, show)
                if moved:
                    add_to(bucket.tensors, (base - self.own[i]).to(bucket.flat.dtype), 1.0)
                else:
                    unpack(base, bucket.tensors)
        for largest in self.largest:
            integers = self._integers()
            parts = largest.split([t.numel() for t in integers])
            for tensor, part in zip(integers, parts, strict=True):
                tensor.copy_(torch.maximum(tensor.to(part), part.view(tensor.shape)))

    def _find_tensors(self) -> None:
        """As they are now: modules rebind buffers, and may be moved."""
        if self._parameters is not None:
            own = (t for t in self._parameters() if t.numel())
            groups = group_tensors(own, self._bucket_bytes)
            for bucket, tensors in zip(self.buckets[: self.parameter_buckets], groups, strict=True):
                bucket.tensors = tensors
        groups = group_tensors((t for t in self._buffers() if t.numel()), self._bucket_bytes)
        for bucket, tensors in zip(self.buckets[self.parameter_buckets :], groups, strict=True):
            bucket.tensors = tensors

    def _apply_update(self, i: int, show: bool) -> None:
        """P ← P + Δ; x ← x + Δ − u: a piece after the other, each while it is in the cache."""
        update, base, run = self._updates[i], self.base[i], Run(self.buckets[i].tensors)
        total, step = update.wait(), piece_elements(base.numel(), base.device)
        scratch = torch.empty(2, min(step, base.numel()), dtype=run.dtype, device=base.device)
        squares, start = np.zeros(2), 0
        while start < base.numel():
            count = min(step, base.numel() - start)
            compiles = not show and self._team.host.scale == 1
            loops = compiled(scratch, base, *self.velocity[i : i + 1]) if compiles else None
            packed = None if loops is None else total.packed(start, count)
            sent = None if packed is None else update.sent.packed(start, packed.count)
            if loops is not None and packed is not None and sent is not None:
                count = sent.count
                self._land_packed(loops, packed, sent, scratch[0, :count], squares, i, start)
            else:
                self._land_numbers(
                    loops, total, update.sent, scratch[:, :count], squares, i, start, show
                )
            run.add(scratch[0, :count], start)
            start += count
        run.write_back()
        self.mean_squared += float(squares[0])
        self.sent_squared += float(squares[1])

    def _land_packed(
        self,
        loops: Kernels,
        total: Packed,
        sent: Packed,
        shift: Tensor,
        squares: Squares,
        i: int,
        start: int,
    ) -> None:
        """Shift ← Δ − u, from payloads in one pass; P and v move."""
        piece = slice(start, start + shift.numel())
        base = self.base[i]
        kept = self.velocity[i][piece] if self.velocity else base[:0]
        loops.land(
            *(total.rows, total.bits, sent.rows[0], sent.bits, total.first, self.weight),
            *(t.numpy() for t in (shift, base[piece], kept)),
            *(self.fade, self.ahead, self._outer.lr, squares),
        )

    def _land_numbers(
        self,
        loops: Kernels | None,
        total: Numbers,
        update: Numbers,
        scratch: Tensor,
        squares: Squares,
        i: int,
        start: int,
        show: bool,
    ) -> None:
        """The first row of ``scratch`` ← Δ − u; P and v move, but not to be shown."""
        shift, sent = scratch
        base = self.base[i][start : start + shift.numel()]
        kept = self.velocity[i][start : start + shift.numel()] if self.velocity else base[:0]
        total.read(shift, start)
        update.read(sent, start)
        shift.div_(self.weight)
        if loops is not None:
            loops.measure(shift.numpy(), squares, 0)
            loops.measure(sent.numpy(), squares, 1)
            arrays = (t.numpy() for t in (shift, sent, base, kept))
            loops.move(*arrays, self.fade, self.ahead, self._outer.lr)
            return
        if self.velocity and not show:
            # Together: each reading would wait for a GPU.
            squares += torch.stack([torch.dot(one, one) for one in (shift, sent)]).tolist()
        self._outer_shift(shift, kept, show)
        if not show:
            base.add_(shift)
        shift.sub_(sent)

    def _outer_shift(self, shift: Tensor, kept: Tensor, show: bool) -> None:
        """Shift ← Δ, of what is D; with ``show`` v stays as it is.

        Each product is rounded before it is added, as in ``kernels.move``.
        """
        if kept.numel():
            velocity = shift + self.fade * kept
            if not show:
                kept.copy_(velocity)
            shift.add_(velocity.mul_(self.ahead))
        if self._outer.lr != 1:
            shift.mul_(self._outer.lr)

    def _step(self, i: int, show: bool) -> Tensor:
        """The outer step of bucket i; with ``show`` P and v stay as they are. The new P."""
        kept, flat = self.base[i], self.buckets[i].flat
        dtype = torch.promote_types(kept.dtype, flat.dtype)
        mean = flat.to(dtype, copy=True).div_(self.weight)  # D
        if self.velocity:
            velocity = self.velocity[i].to(dtype, copy=True).mul_(self._outer.momentum).add_(mean)
            if not show:
                self.velocity[i].copy_(velocity)
            mean.add_(velocity, alpha=self._outer.momentum)
        base = kept.to(dtype, copy=True).add_(mean, alpha=self._outer.lr)
        if show:
            return base.to(kept.dtype)
        return kept.copy_(base)

    def _apply_buffer(self, i: int, moved: bool) -> None:
        bucket = self.buckets[i]
        if moved:
            own = self.own[i] if self.own else self._buffers_own[i - self.parameter_buckets]
            add_clamped(bucket, own, self.weight)
        else:
            bucket.unpack(self.weight)

    def distance(self) -> float:
        """‖mean(s) − s‖ over the parameters, of what has arrived and not landed."""
        parts = []
        for i, bucket in enumerate(self.buckets[: self.parameter_buckets]):
            mean = bucket.flat / self.weight
            if self.base:
                mean += self.base[i]
            parts.append(torch.linalg.vector_norm(mean - self.own[i]).double())
        return float(torch.linalg.vector_norm(torch.stack(parts)).item())

    def release(self) -> None:
        """Free the staging memory of a part that is not under way."""
        if not self._keeps_steps:
            for bucket in self.buckets:
                bucket.release()


def _copy(bucket: Bucket, dtype: torch.dtype | None) -> Tensor:
    flat = bucket.pack()
    return flat.to(dtype or flat.dtype, copy=True)


def cut(tensors: Sequence[Tensor], parts: int) -> list[list[Tensor]]:
    """Contiguous, non-empty parts of about equal bytes; a tensor is not divided.

    The cuts are at the places nearest to 1/P, 2/P, … of all bytes.

    Raises:
        ValueError: there are more parts than tensors.
    """
    if parts > len(tensors):
        raise ValueError(f"{len(tensors)} tensors cannot be cut into {parts} parts")
    sizes = [as_real(t.detach()).numel() * staging_dtype(t).itemsize for t in tensors]
    before = [0, *itertools.accumulate(sizes)]
    cuts = [0]
    for part in range(1, parts):
        target = before[-1] * part / parts
        places = range(cuts[-1] + 1, len(sizes) - parts + part + 1)
        cuts.append(min(places, key=lambda place: abs(before[place] - target)))
    return [list(tensors[a:b]) for a, b in itertools.pairwise([*cuts, len(sizes)])]
