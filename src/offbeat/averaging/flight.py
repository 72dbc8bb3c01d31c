"""Flights: updates of parts of the model, from the launch to the landing.

The symbols are those of ``averager.py``. All work proceeds in *pieces*, slices that fit into the
cache of a processor. So a worker can do a bounded part of the work at the end of a step. The
methods of ``Flight`` that return an iterator pause between two pieces.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from offbeat.averaging.flat import Slice, joined
from offbeat.averaging.model_mean import BufferMean
from offbeat.averaging.votes import Vote
from offbeat.quantization.kernels import kernels_for
from offbeat.quantization.message import Message, QuantizedMessage, Squares
from offbeat.transport.future import Future

Place = tuple[int, int]  # index of a section in a message, and position of a piece in the section


class OuterStep(NamedTuple):
    """The outer step of P along D: v ← momentum·v + D, Δ = direct·D + lookahead·v."""

    momentum: float = 0.0
    direct: float = 1.0
    lookahead: float = 0.0


@dataclass(eq=False)
class Part:
    """A part of the model.

    Attributes:
        index: Position among the parts.
        slices: Slices of the spaces that belong to the part.
        synced_step: Newest local step whose change was sent or, if workers wait for each mean, has
            landed.
        flight: The launch that has not landed; None if there is none.
    """

    index: int
    slices: list[Slice]
    synced_step: int
    flight: "Flight | None" = None


def sections_of(parts: Sequence[Part]) -> list[Slice]:
    """Return the slices of the parts in order, joined where they follow each other."""
    return [each for each, _ in joined((s, None) for part in parts for s in part.slices)]


@dataclass(eq=False)
class Flight:
    """Parts that were launched in one message and have not landed.

    Attributes:
        parts: The parts.
        sections: ``sections_of`` the parts.
        message: Message that contains the updates.
        weight: Weight of this worker.
        total: Function that returns the sum of all workers' weights, once it is known. It must not
            hold the flight: the cycle would keep the message in memory.
        steps: Outer step of each part, or a function that returns it at the landing.
        step: Local step of the launch.
        exact: True if the updates are not quantized.
        measures: True if ``squares`` is needed.
        work: Remaining pieces to pack or to land.
        future: Future of the message; None until it is sent.
        sent_seconds: Time at which the message was sent.
        arrived_seconds: Time at which this worker found that it had arrived.
        buffers: The buffers that are averaged with the parts, if there are any.
        shifts: Δ − u of each section, if a background thread has moved P.
        finite: False if the update of this worker contains NaN or infinity. A tensor has one
            element, on the device of the update.
        squares: ‖D‖² and ‖u‖².
        vote: Vote of this worker, if it travels in the message.
        votes: Votes of all workers, by rank, once the message has arrived.
        sums: Sum of the ``votes``.
        moved: Future that is done when the background thread has moved P; None without a thread.
        background_seconds: Processor time of the background thread.
        processor_seconds: Processor time of the training thread and the background thread.
        received: True once the landing has begun.
    """

    parts: list[Part]
    sections: list[Slice]
    message: Message
    weight: float
    total: Callable[[], float]
    steps: list[OuterStep] | Callable[[], list[OuterStep]]
    step: int
    exact: bool
    measures: bool = False
    work: Iterator[None] = field(default_factory=lambda: iter(()))
    future: Future[Any] | None = None
    sent_seconds: float = 0.0
    arrived_seconds: float | None = None
    buffers: BufferMean | None = None
    shifts: list[Tensor] = field(default_factory=list)
    finite: Tensor | bool = True
    squares: Squares = field(default_factory=lambda: np.zeros(2))
    vote: Vote = field(default_factory=Vote)
    votes: list[Vote] = field(default_factory=list)
    sums: Vote = field(default_factory=Vote)
    moved: Future[None] | None = None
    background_seconds: float = 0.0
    processor_seconds: float = 0.0
    received: bool = False
    _measured: list[Tensor] = field(default_factory=list)  # rows that ``squares`` lacks

    def outer(self) -> list[OuterStep]:
        """Return the outer step of each part."""
        if callable(self.steps):
            self.steps = self.steps()
        return self.steps

    def _pieces(self) -> Iterator[tuple[Place, Slice]]:
        for index, whole in enumerate(self.sections):
            for piece in whole.pieces():
                yield (index, piece.start - whole.start), piece

    def _pieces_and_steps(self) -> Iterator[tuple[Place, Slice, OuterStep]]:
        pairs = zip(self.parts, self.outer(), strict=True)
        index = 0
        for whole, step in joined((each, step) for part, step in pairs for each in part.slices):
            while not self.sections[index].contains(whole):
                index += 1
            for piece in whole.pieces():
                yield (index, piece.start - self.sections[index].start), piece, step

    def _fused(self) -> QuantizedMessage | None:
        """Return the message if Triton kernels encode and land it, else None."""
        message = self.message
        if isinstance(message, QuantizedMessage) and message.kernels is not None:
            return message
        return None

    # -- launch ----------------------------------------------------------------------------------

    def pack(self, *, check: bool, mark: bool) -> Iterator[None]:
        """Write this worker's updates into the message.

        Args:
            check: True if NaN in an update must be found before it is sent.
            mark: True if the changes up to the step of the launch count as sent now.
        """
        if not self.weight:
            self.message.clear()
            return
        yield from _with_pauses(self._pieces(), partial(self._pack, check=check))
        if mark:
            for part in self.parts:
                part.synced_step = self.step

    def _pack(self, place: Place, piece: Slice, *, check: bool) -> None:
        space, (start, stop) = piece.space, (piece.start, piece.stop)
        fused = self._fused()
        if fused is not None and space.P is not None:
            table, error, _ = space.table(start, stop, fused.kernels)
            (rows, _), bits = fused.encoded(*place, len(piece)), fused.codec.bits
            shared = space.staged(space.P[start:stop])
            fused.kernels.encode(table, error, shared, rows, fused.flag, bits)
            return
        values = torch.empty(len(piece), dtype=space.x.dtype, device=space.x.device)
        space.read(start, values)
        if space.P is not None:
            values.sub_(space.staged(space.P[start:stop]))
            if check:
                self.finite = self.finite & torch.dot(values, values).isfinite()
        elif self.weight != 1:
            values.mul_(self.weight)
        self.message.write(*place, values)

    # -- landing ---------------------------------------------------------------------------------

    def move(self, memory: list[Tensor]) -> None:
        """Apply the outer step to P and v, and keep Δ − u in ``shifts``. For a background thread.

        ``memory`` has one tensor for each section, of the ``shifts`` of earlier flights, which have
        landed. One that is missing or too short is replaced. On a CPU, new memory for each flight
        would cost a page fault for every 4 kB. If no worker has sent an update, P stays.
        """
        for index, each in enumerate(self.sections):
            shift, x = memory[index] if index < len(memory) else None, each.space.x
            known = shift is not None and (shift.dtype, shift.device) == (x.dtype, x.device)
            if shift is None or not known or len(shift) < len(each):
                shift = torch.empty(len(each), dtype=x.dtype, device=x.device)
                memory[index : index + 1] = [shift]
            self.shifts.append(shift[: len(each)])
        if self.total():
            for place, piece, step in self._pieces_and_steps():
                self._move(place, piece, step, self._shift(place, piece))
            self._read_squares()
        else:
            for shift in self.shifts:
                shift.zero_()

    def _shift(self, place: Place, piece: Slice) -> Tensor:
        index, start = place
        return self.shifts[index][start : start + len(piece)]

    def add(self) -> Iterator[None]:
        """Add the ``shifts`` to the local model."""
        yield from _with_pauses(self._pieces(), self._add)

    def _add(self, place: Place, piece: Slice) -> None:
        self._add_values(piece, self._shift(place, piece))

    def _add_values(self, piece: Slice, values: Tensor) -> None:
        fused = self._fused()
        piece.space.add(piece.start, values, None if fused is None else fused.kernels)

    def move_and_add(self, *, overwrite: bool) -> None:
        """Move P, v and the local model.

        ``overwrite``: the local model has not changed since the launch, so x ← P, with the same
        bits on all workers.
        """
        for place, piece, step in self._pieces_and_steps():
            self._move_and_add(place, piece, step, overwrite=overwrite and self.exact)
        self._read_squares()

    def _move_and_add(
        self, place: Place, piece: Slice, step: OuterStep, *, overwrite: bool
    ) -> None:
        space = piece.space
        shift = torch.empty(len(piece), dtype=space.x.dtype, device=space.x.device)
        if space.P is not None:
            shared = self._move(place, piece, step, shift)
            overwrite &= space.P.dtype == shift.dtype
        else:
            shared, sent = torch.empty_like(shift), torch.empty_like(shift)
            self.message.read(*place, shared, sent)
            shared.mul_(1 / self.total())
            if not overwrite:
                self._shift_to_mean(piece, shared, sent, shift)
        if overwrite:
            space.write(piece.start, shared)
        else:
            self._add_values(piece, shift)

    def preview(self) -> None:
        """Change x as the landing will, but nothing else. The caller restores x."""
        assert self.future is not None
        self.future.wait()
        if not self.total():
            return
        squares = self.squares.copy()
        for place, piece, step in self._pieces_and_steps():
            space = piece.space
            vectors = [t for t in (space.P, space.v, space.error) if t is not None]
            some = slice(piece.start, piece.stop)
            # P in host memory travels over the GPU, behind earlier copies.
            saved = [v[some].to(space.x.device, copy=True, non_blocking=True) for v in vectors]
            self._move_and_add(place, piece, step, overwrite=False)
            for vector, values in zip(vectors, saved, strict=True):
                vector[some].copy_(values, non_blocking=True)
        self.squares = squares
        self._measured.clear()

    def _shift_to_mean(self, piece: Slice, mean: Tensor, sent: Tensor, shift: Tensor) -> None:
        """shift ← mean − u, where P is not stored. ``sent`` is w·u and is overwritten."""
        if self.weight:
            sent.mul_(1 / self.weight)
        else:  # this worker has sent nothing: its model becomes the mean
            piece.space.read(piece.start, sent)
        torch.sub(mean, sent, out=shift)

    def _move(self, place: Place, piece: Slice, step: OuterStep, shift: Tensor) -> Tensor:
        """Move P and v of a piece, and return P.  shift ← Δ − u."""
        with piece.space.moving(piece.start, piece.stop) as (shared, velocity):
            self._land(place, step, shift, shared, velocity)
        if piece.space.in_place:
            self._read_squares()
        return shared

    def _land(
        self, place: Place, step: OuterStep, shift: Tensor, shared: Tensor, velocity: Tensor
    ) -> None:
        total, fused = self.total(), self._fused()
        if fused is not None:
            update, summands = fused.encoded(*place, len(shift))
            squares = fused.kernels.move(
                summands, update, shift, total, shared, velocity, step, fused.codec.bits
            )
            if self.measures:
                self._measured.append(squares)
            return
        sent = torch.empty_like(shift)
        self.message.read(*place, shift, sent)
        # The compiled loop and ``_apply`` round ‖D‖² differently.
        loops = kernels_for(shift, shared, velocity) if self.message.quantized else None
        if loops is None:
            self._apply(shift, sent, shared, velocity, step, total)
        else:
            vectors = shared.numpy(), velocity.numpy()
            loops.land(shift.numpy(), sent.numpy(), total, *vectors, *step, self.squares)

    def _read_squares(self) -> None:
        """Add ``_measured`` to ``squares``, one row after the other, as the compiled loop does.

        Waits for a GPU, so only once in a landing with many pieces.
        """
        if self._measured:
            first, *more = self._measured
            rows = torch.cat([first, *(each.to(first.device) for each in more)]) if more else first
            self.squares = np.add.accumulate(np.vstack([self.squares, rows.cpu().numpy()]))[-1]
            self._measured.clear()

    def _apply(
        self,
        shift: Tensor,
        sent: Tensor,
        shared: Tensor,
        velocity: Tensor,
        step: OuterStep,
        total: float,
    ) -> None:
        """Move P and v by the sum of the updates in ``shift``, like the compiled loop ``land``."""
        shift.mul_(1 / total)
        if self.measures:
            pair = torch.stack([torch.dot(shift, shift), torch.dot(sent, sent)])
            self._measured.append(pair.double()[None])
        # Each product is rounded before it is added, as in the compiled loop.
        if velocity.numel():
            velocity.mul_(step.momentum).add_(shift)
            ahead = velocity * step.lookahead
            shift.mul_(step.direct).add_(ahead)
        else:
            shift.mul_(step.direct)
        shared.add_(shift)
        shift.sub_(sent)


def _with_pauses(
    pieces: Iterable[tuple[Place, Slice]], work: Callable[[Place, Slice], None]
) -> Iterator[None]:
    """Do the work of each piece. The iterator has an item between two pieces."""
    for index, (place, piece) in enumerate(pieces):
        if index:
            yield
        work(place, piece)
