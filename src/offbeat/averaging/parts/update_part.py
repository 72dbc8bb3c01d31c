"""A part whose quantization error stays in the local model, and is sent with the next update.

x is the local model, and P the shared model, which is equal on all workers; ``part.py`` explains
the other terms. A worker sends u, the quantized x − P. At the landing x moves by Δ − u, so the
quantization error remains in x − P, and the next launch sends it.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from offbeat.averaging.flat_view import Difference
from offbeat.averaging.parts.part import Part
from offbeat.quantization.base import piece_elements
from offbeat.quantization.decoding import LazyVector, TensorVector, UpdateSum
from offbeat.quantization.kernels import Kernels, kernels_for
from offbeat.quantization.wire import Precision
from offbeat.transport.handle import Completed, Handle

Squares = NDArray[np.float64]
"""‖D‖² and ‖u‖², each summed over the pieces of one bucket that have landed so far."""


@dataclass(init=False, eq=False)
class UpdatePart(Part):
    """A part with error feedback: its quantization error stays in x until the next launch.

        launch:   u = C(x − P)
        landing:  D = Σ w·u / Σ w            over the workers; w is 0 for one without an update
                  v ← μ·v + D                μ: decay of the momentum v
                  Δ = D + a·v                a: factor with which v acts on the model
                  P ← P + Δ
                  x ← x + Δ − u

    μ and a may differ between launches. On a CPU, a landing decodes u and the sum piece by piece,
    and moves P, v and x while a piece is in the processor's cache. On a GPU, a piece is a whole
    bucket.

    The arguments are those of ``Part``.

    Attributes:
        momentum: μ of the last launch whose sums have arrived.
        lookahead: a of the last launch whose sums have arrived.

    *Memory*, in multiples of the part's size: P, and v if there is an outer momentum. In flight, u
    and the sum are stored, too, encoded at the precision of the launch.
    """

    most_buckets: ClassVar[float] = 4
    momentum: float = 0.0
    lookahead: float = 0.0

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.keeps_base = True
        for bucket in self.buckets[: self.parameter_buckets]:
            self.base.append(bucket.copy_parameters())
        for bucket in self.buckets:
            bucket.release()
        if self._outer.momentum:
            self.velocity = [torch.zeros_like(p) for p in self.base]
        self.momentum = self.lookahead = self._outer.momentum
        self._fixed_step = Completed((self._outer.momentum, self._outer.momentum))
        self._outer_step: Handle[tuple[float, float]] = self._fixed_step
        self._updates: list[UpdateSum] = []
        self._own_buffers: list[Tensor] = []
        self._squares: list[Tensor] = []  # pairs ‖D‖², ‖u‖², which ``_write`` reads together

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
        self._begin(total, weight, step)
        self._outer_step = self._fixed_step if outer_step is None else outer_step
        self.sums, self.own = [], []  # only used by checkpoints
        self._updates, self._own_buffers = [], []
        for i, bucket in enumerate(self.buckets):
            if i < self.parameter_buckets:
                update = self._wire.sum_updates(
                    Difference(bucket.flat_view, self.base[i]),
                    stream=f"{self._name}, bucket {i}",
                    what=what,
                    contribute=weight != 0,
                    precision=precision,
                )
                self._updates.append(update)
                self._handles.append(update)
                continue
            flat = bucket.pack()
            self._own_buffers.append(flat.clone())
            if not weight:
                flat.zero_()
            self._handles.append(self._team.communicator.sum(flat, what=what))

    @override
    def _receive(self) -> None:
        self.momentum, self.lookahead = self._outer_step.wait()
        for i, handle in enumerate(self._handles):
            result = handle.wait()
            if i >= self.parameter_buckets:
                self.buckets[i].flat.copy_(result)

    @override
    def _write(self, *, moved: bool, show: bool) -> None:
        self.mean_squared = self.sent_squared = 0.0
        self._refresh_tensors()
        for i in range(len(self.buckets)):
            if i < self.parameter_buckets:
                self._write_bucket(i, show)
            else:
                own = self._own_buffers[i - self.parameter_buckets]
                self.buckets[i].write_buffers(own if moved else None, self.weight)
        if not show:
            self._updates, self._own_buffers = [], []
        if self._squares:  # one read for all, because each read waits for the GPU
            device = self._squares[0].device
            squares = torch.stack([pair.to(device) for pair in self._squares]).double().sum(0)
            mean_squared, sent_squared = squares.tolist()
            self.mean_squared += mean_squared
            self.sent_squared += sent_squared
            self._squares = []

    def _write_bucket(self, i: int, show: bool) -> None:
        """v ← μ·v + D; P ← P + Δ; x ← x + Δ − u, in pieces. With ``show`` P and v stay."""
        update, base = self._updates[i], self.base[i]
        view = self.buckets[i].flat_view
        total, limit = update.wait(), piece_elements(base.numel(), base.device)
        scratch = torch.empty(2, min(limit, base.numel()), dtype=view.dtype, device=base.device)
        # The compiled loops always move P.
        kernels = None if show else kernels_for(scratch, base, *self.velocity[i : i + 1])
        squares, start = np.zeros(2), 0
        while start < base.numel():
            piece, done = scratch[:, : base.numel() - start], 0
            while done < piece.shape[1]:
                sums, at = (total, update.sent), start + done
                count = self._land_packed(kernels, *sums, piece[0, done:], squares, i, at)
                if not count:
                    count = piece.shape[1] - done
                    self._land_decoded(kernels, *sums, piece[:, done:], squares, i, at, show)
                done += count
            view.add(piece[0], start)
            start += done
        view.write_back()
        self.mean_squared += float(squares[0])
        self.sent_squared += float(squares[1])

    def _land_packed(
        self,
        kernels: Kernels | None,
        total: LazyVector,
        update: LazyVector,
        shift: Tensor,
        squares: Squares,
        i: int,
        start: int,
    ) -> int:
        """Compute shift ← Δ − u in one pass. Moves P and v, adds to ``squares``.

        Returns the number of elements, which may end with a chunk of the sum. It is 0 without
        ``kernels`` and if the payloads are not integers on the CPU.
        """
        packed = None if kernels is None else total.packed(start, shift.numel())
        sent = None if packed is None else update.packed(start, packed.count)
        if kernels is None or packed is None or sent is None:
            return 0
        piece = slice(start, start + sent.count)
        base = self.base[i].numpy()
        velocity = self.velocity[i].numpy()[piece] if self.velocity else base[:0]
        kernels.land(
            *(packed.rows, packed.bits, sent.rows[0], sent.bits, packed.first, self.weight),
            *(shift.numpy()[: sent.count], base[piece], velocity),
            *(self.momentum, self.lookahead, squares),
        )
        return sent.count

    def _land_decoded(
        self,
        kernels: Kernels | None,
        total: LazyVector,
        update: LazyVector,
        scratch: Tensor,
        squares: Squares,
        i: int,
        start: int,
        show: bool,
    ) -> None:
        """Compute scratch[0] ← Δ − u of one piece.

        Unless ``show`` is set, this moves P and v, and adds to ``squares`` or ``self._squares``.
        """
        shift, sent = scratch
        base = self.base[i][start : start + shift.numel()]
        velocity = self.velocity[i][start : start + shift.numel()] if self.velocity else base[:0]
        total.read(shift, start)
        update.read(sent, start)
        shift.mul_(1 / self.weight)
        if kernels is not None:
            kernels.add_squared_norm(shift.numpy(), squares, 0)
            kernels.add_squared_norm(sent.numpy(), squares, 1)
            arrays = (t.numpy() for t in (shift, sent, base, velocity))
            kernels.apply_mean(*arrays, self.momentum, self.lookahead)
            return
        if not show:
            self._squares.append(torch.stack([torch.dot(values, values) for values in scratch]))
        self._outer_shift(shift, velocity, show)
        if not show:
            base.add_(shift)
        shift.sub_(sent)

    def _outer_shift(self, shift: Tensor, velocity: Tensor, show: bool) -> None:
        """Replace D in ``shift`` by Δ. Moves v, unless ``show`` is set.

        Each product is rounded before it is added, as in ``kernels.apply_mean``, so both give the
        same bits.
        """
        if velocity.numel():
            new_velocity = shift + self.momentum * velocity
            if not show:
                velocity.copy_(new_velocity)
            shift.add_(new_velocity.mul_(self.lookahead))

    # -- checkpoints -----------------------------------------------------------------------------

    @override
    def before_save(self) -> None:
        self.wait()
        if self.in_flight:
            buffers = self.buckets[self.parameter_buckets :]
            sums = [update.wait().to_tensor() for update in self._updates]
            self.sums = sums + [b.flat for b in buffers]
            sent = (update.sent.to_tensor() for update in self._updates)
            self.own = [*sent, *self._own_buffers]

    @override
    def after_load(self) -> None:
        if self.in_flight:
            sums, own = (
                [t.to(b.tensors[0].device) for t, b in zip(saved, self.buckets, strict=True)]
                for saved in (self.sums, self.own)
            )
            count = self.parameter_buckets
            vectors = [[*map(TensorVector, pair)] for pair in zip(sums, own, strict=True)]
            self._updates = [UpdateSum(Completed(total), u) for total, u in vectors[:count]]
            self._own_buffers = own[count:]
            for bucket, total in zip(self.buckets[count:], sums[count:], strict=True):
                bucket.flat.copy_(total)
        self.sums, self.own = [], []
