"""Averaging of models: how parts of the shared model are launched and landed.

Each worker trains a *local model* x. All workers share a model P, which has the same bits on each
of them. P is cut into *parts*. To *launch* a part, every worker sends its update u, and when the
sum of the updates has arrived, the part *lands*:

    launch:   u = C(x − P)              C quantizes; the quantization error stays in x − P
    sum:      D = Σ w·u / Σ w           w: weight of a worker, 0 without new steps
    landing:  v ← μ·v + D               only with an outer momentum μ
              Δ = c·D + a·v
              P ← P + Δ
              x ← x + Δ − u             the local steps since the launch stay in x

A strategy chooses when parts are launched, how late they land, and μ, c and a. If all workers wait
for each mean, which is sent exactly and without an outer step, P is not stored: u is x, and x
becomes the mean.

``RoundAverager`` launches parts in *rounds*: the workers vote, and the strategy decides.
``ClockedAverager`` needs no votes before a launch: the landing of one message starts the next.

Invariants:

1. A part is in at most one message. Between two launches P and x move by the same Δ, apart from u.
2. All workers launch the same parts in the same order, with the same μ, c and a. So P changes by
   the same bytes on all of them.
3. A worker at a barrier launches and lands like the others, so they do not wait for it.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from offbeat.averaging.buckets import Bucket, add_clamped, make_buckets
from offbeat.averaging.carried_state import common_values, keep_local_values, load_common_values
from offbeat.averaging.flat import Slice, cut, cut_by_tensors, make_spaces, model_bytes
from offbeat.averaging.flow import Flow
from offbeat.averaging.landing import Landing, land
from offbeat.averaging.pace import Pace, Sizer
from offbeat.averaging.rounds import WaitingWarning
from offbeat.averaging.votes import Round, Sums, Vote
from offbeat.averaging.worker import AttachedOptimizer, Worker
from offbeat.quantization.kernels import kernels_for
from offbeat.quantization.message import Message, Squares, Stream, make_message
from offbeat.quantization.precision import uses_single_stage
from offbeat.strategies.base import SharedModel, Strategy, Tally, WorkerView, transient
from offbeat.transport.handle import Completed, Handle

_SMOOTHED_PASSES = 5
"""‖u‖² and ‖D‖² are summed over the landings. A summand decays to 1/e in so many passes."""
_BOUNDARY_SHARE = 0.03
"""Share of a step for which the training thread may pack or land parts at a step boundary."""


class Step(NamedTuple):
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
        stream: Quantization errors and memory of its messages.
        synced_step: Newest local step whose change was sent or, if workers wait for each mean, has
            landed.
        flight: The launch that has not landed; None if there is none.
    """

    index: int
    slices: list[Slice]
    stream: Stream
    synced_step: int
    flight: "Flight | None" = None

    def pieces(self) -> Iterator[tuple[int, int, Slice]]:
        """Yield all pieces: index of the slice, first number in the slice, piece of the space."""
        for index, whole in enumerate(self.slices):
            for piece in whole.pieces():
                yield index, piece.start - whole.start, piece


@dataclass(eq=False)
class Flight:
    """Parts that were launched in one message and have not landed.

    Attributes:
        parts: The parts.
        message: Their updates.
        weight: Weight of this worker.
        total_of: Function that returns the sum of all workers' weights for a launch, once it is
            known. It must not hold the launch: the cycle would keep the message in memory.
        steps: Outer step of each part, or a function that returns it at the landing.
        step: Local step of the launch.
        work: Remaining pieces to pack or to land; each item is done when it is requested.
        handle: Handle of the message; None until it is sent.
        sent_seconds: Time at which the message was sent.
        arrived_seconds: Time at which this worker found that it had arrived.
        buffers: Buckets of buffers, the values that this worker has sent, and their sums.
        shifts: Δ − u of each slice, if a background thread has moved P.
        finite: False if the update of this worker contains NaN or infinity.
        squares: ‖D‖² and ‖u‖².
        vote: Vote of this worker, if it travels in the message.
        sums: Sum of all workers' votes, if they travel in the message.
        fastest: Least time, in steps, that a worker has measured for the previous message.
        moved: Handle of the work of the background thread; None if there is none.
        background_seconds: Processor time of the background thread.
        received: True once the landing has begun.
    """

    parts: list[Part]
    message: Message
    weight: float
    total_of: Callable[["Flight"], float]
    steps: list[Step] | Callable[[], list[Step]]
    step: int
    work: Iterator[None] = field(default_factory=lambda: iter(()))
    handle: Handle[Any] | None = None
    sent_seconds: float = 0.0
    arrived_seconds: float | None = None
    buffers: list[tuple[Bucket, Tensor, Handle[Tensor]]] = field(default_factory=list)
    shifts: list[list[Tensor]] = field(default_factory=list)
    finite: bool = True
    squares: Squares = field(default_factory=lambda: np.zeros(2))
    vote: Vote | None = None
    sums: Sums | None = None
    fastest: float = math.inf
    moved: Handle[None] | None = None
    background_seconds: float = 0.0
    received: bool = False

    def total(self) -> float:
        """Return the sum of all workers' weights."""
        return self.total_of(self)

    def outer(self) -> list[Step]:
        """Return the outer step of each part."""
        if callable(self.steps):
            self.steps = self.steps()
        return self.steps


@dataclass
class AveragerState:
    """State of an ``Averager``. A checkpoint contains it when nothing is in flight.

    Attributes:
        shared: P, one tensor for each dtype and device of the parameters. Empty if not stored.
        velocity: v, like ``shared``.
        errors: Quantization errors of the sums of each part; see ``Stream``.
        view: The data about this worker that the strategy may read.
        synced_steps: ``Part.synced_step`` of each part.
        next_part: Index of the part that is launched next.
        checked_step: Local step of the last check for non-finite values.
        staleness: Histogram: for each staleness, the number of local steps that ended with it.
        flight_seconds: Seconds from launch to arrival, summed over all landings.
        sizer: Chooses the parts in a message. Only used with self-clocked launches.
        saved_tally: ``delayed`` as a list of numbers. Empty if it is None.
        delayed: Previous round, if the strategy decides a round with the tally of the previous one.
    """

    shared: list[Tensor]
    velocity: list[Tensor]
    errors: list[Tensor]
    view: WorkerView
    sizer: Sizer
    synced_steps: list[int] = field(default_factory=list)
    next_part: int = 0
    checked_step: int = 0
    staleness: dict[int, int] = field(default_factory=dict)
    flight_seconds: float = 0.0
    saved_tally: list[float] = field(default_factory=list)
    delayed: Round | None = transient(default=None)


class Averager(Flow):
    """Averages models for a strategy; see the module's docstring.

    A subclass decides when parts are launched and landed.
    """

    state: AveragerState
    vote_length = 0
    """Number of numbers in a vote that is sent with a message."""
    stores_shared = False
    """True if P is stored in any case."""

    def __init__(self, strategy: Strategy, worker: Worker, shared: SharedModel) -> None:
        super().__init__(strategy, worker)
        self.shared = shared
        self.uses_gradients = strategy.gradient_norm
        self.waits = shared.blocking and shared.outer.plain and worker.wire.exact
        self._calls_after_step = type(strategy).after_step is not Strategy.after_step
        self._squared = 0.0  # ‖g‖² of this step's gradients so far
        self._flying: list[Flight] = []  # the oldest first

    @override
    def start(self, common: dict[str, Any] | None = None) -> None:
        worker = self.worker
        self._flying.clear()
        self._make_parts()
        view = worker.strategy_view()
        view.count = len(self.parts)
        view.start_step = worker.step if common is None else common["step"]
        view.state = self.strategy.state(view)
        if common is not None:
            load_common_values(view.state, common["state"])
        self.state = AveragerState(
            [space.P for space in self.spaces if space.P is not None],
            [space.v for space in self.spaces if space.v is not None],
            [part.stream.errors for part in self.parts if part.stream.errors is not None],
            view,
            Sizer(len(self.parts)),
            checked_step=worker.step,
        )

    def _make_parts(self) -> None:
        worker, shared, team = self.worker, self.shared, self.worker.team
        tensors, wire = [p for _, p in worker.replica.parameters], worker.wire
        several = worker.size > 1
        # An exact mean of whole models needs no P.
        # A worker that is alone takes outer steps, too, but not those that shorten disagreement.
        steps = not shared.outer.plain and (several or not shared.error_feedback)
        stores = self.stores_shared or steps or (several and (not wire.exact or shared.eager))
        velocity = steps and shared.outer.momentum > 0
        self.spaces = make_spaces(tensors, shared=stores, velocity=velocity)
        size = sum(t.nbytes for t in tensors)
        if team.sharded:
            size = round(team.agree(size)[0])
        number = shared.parts(size) if callable(shared.parts) else shared.parts
        if shared.error_feedback:
            slices = cut(self.spaces, number)
        else:
            sizes = team.over_shards(*model_bytes(tensors))
            slices = cut_by_tensors(self.spaces, tensors, number, sizes)
        if team.sharded:  # the processes of a node start the sum of each part together
            slices += [[] for _ in range(int(team.agree(len(slices))[0]) - len(slices))]
        self.parts = []
        for index, part in enumerate(slices):
            shapes = [(len(each), each.space.x.dtype, each.space.x.device) for each in part]
            self.parts.append(Part(index, part, Stream(shapes, worker.size), worker.step))
        streams = [part.stream for part in self.parts]
        saved = [wire.saves(stream.elements, 4) for stream in streams if stream.elements]
        self.precision: str | None = wire.precision if all(saved) and not wire.exact else None
        if team.sharded:
            exact = team.agree(float(self.precision is None))[0]
            self.precision = None if exact else self.precision
        self.make_errors()

    def make_errors(self) -> None:
        """Allocate the quantization errors of sums, if there are any."""
        if self.precision is None or uses_single_stage(self.precision, self.worker.size):
            return
        for part in self.parts:
            part.stream.make_errors()

    @override
    def keep_local(self, before: Flow) -> None:
        assert isinstance(before, Averager)
        keep_local_values(self.state.view.state, before.state.view.state)

    @override
    def common_values(self) -> dict[str, Any]:
        return {"step": self.worker.step, "state": common_values(self.state.view.state)}

    @property
    @override
    def unsynced(self) -> bool:
        step = self.worker.step
        return self.worker.touched or any(step > part.synced_step for part in self.parts)

    @property
    @override
    def lr_factor(self) -> float:
        return self.state.view.lr_factor

    def view_of(self, *, stepping: bool) -> WorkerView:
        """Return the strategy's view of this worker, up to date."""
        view, worker = self.state.view, self.worker
        view.step, view.stepping, view.record = worker.step, stepping, worker.record
        return view

    @override
    def gradients_ready(self, optimizer: AttachedOptimizer, *, last: bool) -> bool:
        """Measure ‖g‖² if the strategy reads it."""
        if self.strategy.gradient_norm:
            self._squared += self.worker.squared_norm(optimizer.gradients())
            if last:
                self.state.view.gradient_norm_squared = self._squared
                self.worker.norm_squared, self._squared = self._squared, 0.0
        return False

    @override
    def step_skipped(self) -> None:
        step = self.worker.step
        for part in self.parts:
            if part.synced_step == step - 1:
                part.synced_step = step

    # -- launching -------------------------------------------------------------------------------

    def begin(
        self,
        parts: Sequence[Part],
        weight: float,
        total_of: Callable[[Flight], float],
        steps: list[Step] | Callable[[], list[Step]],
    ) -> Flight:
        """Begin a launch. ``pack`` and ``send`` complete it."""
        view, worker = self.state.view, self.worker
        view.launches, view.launch_step = view.launches + len(parts), worker.step
        numbers = ", ".join(str(part.index) for part in parts)
        message = self.make_message(
            [part.stream for part in parts],
            f"launch {view.launches} (part {numbers}) at step {worker.step}",
        )
        flight = Flight([*parts], message, weight, total_of, steps, worker.step)
        for space in self.spaces:
            space.x.refresh()
        flight.work = self._packing(flight)
        for part in parts:
            part.flight = flight
        self._flying.append(flight)
        return flight

    def make_message(self, streams: Sequence[Stream], what: str) -> Message:
        """Return a new message. A subclass may use another kind of message."""
        return make_message(
            self.worker.team,
            self.worker.wire.twin,
            self.precision,
            streams,
            what,
            vote=self.vote_length,
            keep=not (self.shared.blocking and self.precision is None),
        )

    def _packing(self, flight: Flight) -> Iterator[None]:
        """Write this worker's updates into the message, piece by piece."""
        if not flight.weight:
            flight.message.clear()
            return
        checks = self.worker.size > 1
        for index, part in enumerate(flight.parts):
            for number, start, piece in part.pieces():
                space = piece.space
                values = torch.empty(len(piece), dtype=space.x.dtype, device=space.x.device)
                space.x.read(piece.start, values)
                if space.P is not None:
                    values.sub_(space.P[piece.start : piece.stop])
                    if checks and self.precision in (None, "bfloat16"):
                        squared = torch.dot(values, values).item()
                        flight.finite = flight.finite and math.isfinite(squared)
                elif flight.weight != 1:
                    values.mul_(flight.weight)
                finite = flight.message.write(index, number, start, values)
                flight.finite = flight.finite and finite
                if not self.shared.blocking:
                    part.synced_step = self.worker.step
                yield

    def check_launch(self, flight: Flight) -> bool:
        """Return False if a launch contains NaN or infinity, on any shard of the model.

        Unless the policy is "warn", the worker then sends zeros, because its vote may have
        announced its weight.
        """
        worker = self.worker
        if not self.state.shared or worker.size == 1:
            return True
        if self.sends_buffers(flight) and not worker.finite_buffers():
            flight.finite = False
        (wrong,) = worker.team.over_shards(float(not flight.finite))
        flight.finite = not wrong
        if wrong and worker.guarded:
            flight.message.clear()
        return flight.finite

    def sends_buffers(self, flight: Flight) -> bool:
        """Return True if the floating-point buffers are averaged with this launch."""
        return flight.parts[-1].index == len(self.parts) - 1

    def send(self, flight: Flight, vote: Sequence[float] | None = None) -> None:
        """Send the message, and the buffers with the last part of the model."""
        worker = self.worker
        if self.sends_buffers(flight):
            self._send_buffers(flight)
        flight.handle = flight.message.start(vote)
        flight.sent_seconds = worker.team.host.now()

    def _send_buffers(self, flight: Flight) -> None:
        """Start the sums of the floating-point buffers, which are small."""
        worker = self.worker
        keeps = flight.finite or not worker.guarded
        for bucket in make_buckets(worker.replica.float_buffers()):
            flat = bucket.pack(flight.weight if keeps else 0.0)
            own = flat.clone()
            if flight.weight not in (0, 1) and keeps:
                own.mul_(1 / flight.weight)
            what = f"buffers with {flight.message.what}"
            flight.buffers.append((bucket, own, worker.team.communicator.sum(flat, what=what)))

    # -- landing ---------------------------------------------------------------------------------

    def land(self, flight: Flight, *, take: bool = True) -> None:
        """Wait for a message, then move P and the local model. If it fails, nothing changes.

        ``take`` False discards the mean, which is allowed only if P is not stored.
        """
        assert flight.handle is not None
        self.worker.team.communicator.timed(flight.handle).wait()
        self._wait_for_buffers(flight)
        self._land_with_optimizer_state(flight)
        if not flight.shifts and take and self._positive(flight):
            flight.work = self._moving(flight)
        if take:
            for _ in flight.work:
                pass
        self.landed(flight, take=take)

    def _wait_for_buffers(self, flight: Flight) -> None:
        for _, _, handle in flight.buffers:
            handle.wait()
        if flight.arrived_seconds is None:
            flight.arrived_seconds = self.worker.team.host.now()

    def _positive(self, flight: Flight) -> bool:
        return flight.total() > 0

    def _land_with_optimizer_state(self, flight: Flight) -> None:
        """Average the optimizers' state with the last part, if the strategy asks for it."""
        if not self.shared.optimizer_state or flight.parts[-1] is not self.parts[-1]:
            return
        total = flight.total()
        extra: list[Landing] = (
            self.worker.optimizer_state.launch(flight.weight, total) if total else []
        )
        land(extra, self.worker.team.host)

    def move(self, flight: Flight) -> None:
        """Move P and v, and keep Δ − u of each slice in ``shifts``. For a background thread."""
        flight.shifts = [
            [torch.zeros(len(s), dtype=s.space.x.dtype, device=s.space.x.device) for s in p.slices]
            for p in flight.parts
        ]
        total = flight.total()
        if not total:
            return
        for index, (part, step) in enumerate(zip(flight.parts, flight.outer(), strict=True)):
            for number, start, piece in part.pieces():
                shift = flight.shifts[index][number][start : start + len(piece)]
                self._move_piece(flight, (index, number, start), piece, step, total, shift)

    def adding(self, flight: Flight) -> Iterator[None]:
        """Add the ``shifts`` to the local model, piece by piece."""
        for index, part in enumerate(flight.parts):
            for number, start, piece in part.pieces():
                shift = flight.shifts[index][number][start : start + len(piece)]
                piece.space.x.add(piece.start, shift)
                yield

    def _show(self, flight: Flight) -> None:
        """Change the local model as the landing will. The caller restores the model."""
        assert flight.handle is not None
        flight.handle.wait()
        if not flight.total():
            return
        squares, flight.squares = flight.squares, np.zeros(2)
        pieces = (piece for part in flight.parts for _, _, piece in part.pieces())
        moving = self._moving(flight)
        for piece in pieces:
            vectors = [t for t in (piece.space.P, piece.space.v) if t is not None]
            some = slice(piece.start, piece.stop)
            saved = [vector[some].clone() for vector in vectors]
            next(moving)
            for vector, values in zip(vectors, saved, strict=True):
                vector[some] = values
        flight.squares = squares

    def _moving(self, flight: Flight) -> Iterator[None]:
        """Move P, v and the local model, piece by piece."""
        total = flight.total()
        # Without local steps since the launch x ← P, with the same bits on all workers.
        unmoved = self.shared.blocking or self.worker.model_version <= flight.step
        exact = self.precision is None and unmoved
        for index, (part, step) in enumerate(zip(flight.parts, flight.outer(), strict=True)):
            for number, start, piece in part.pieces():
                space = piece.space
                shift = torch.empty(len(piece), dtype=space.x.dtype, device=space.x.device)
                place = index, number, start
                if space.P is not None:
                    self._move_piece(flight, place, piece, step, total, shift)
                    shared = space.P[piece.start : piece.stop]
                else:
                    shared = self._mean_of_piece(flight, place, piece, total, shift)
                if exact:
                    space.x.write(piece.start, shared)
                else:
                    space.x.add(piece.start, shift)
                yield

    def _mean_of_piece(
        self,
        flight: Flight,
        place: tuple[int, int, int],
        piece: Slice,
        total: float,
        shift: Tensor,
    ) -> Tensor:
        """Return the mean of a piece whose P is not stored.  shift ← the mean − what was sent."""
        sent = torch.empty_like(shift)
        mean = torch.empty_like(shift)
        flight.message.read(*place, mean, sent)
        mean.mul_(1 / total)
        if flight.weight:
            sent.mul_(1 / flight.weight)
        else:  # this worker has sent nothing: its model becomes the mean
            piece.space.x.read(piece.start, sent)
        torch.sub(mean, sent, out=shift)
        return mean

    def _move_piece(
        self,
        flight: Flight,
        place: tuple[int, int, int],
        piece: Slice,
        step: Step,
        total: float,
        shift: Tensor,
    ) -> None:
        """Move P and v of a piece.  shift ← Δ − u.

        ``place`` is the piece's part, slice and start in the message.
        """
        space, message, done = piece.space, flight.message, 0
        part, number, start = place
        assert space.P is not None
        shared = space.P[piece.start : piece.stop]
        velocity = None if space.v is None else space.v[piece.start : piece.stop]
        vectors = [shift, shared] if velocity is None else [shift, shared, velocity]
        loops = kernels_for(*vectors)
        while done < len(piece):
            packed = loops and message.packed(part, number, start + done, len(piece) - done)
            if not packed:
                break
            assert loops is not None
            count, arguments = packed
            some = slice(done, done + count)
            base = shared[some].numpy()
            moving = base[:0] if velocity is None else velocity[some].numpy()
            vectors_of = (shift[some].numpy(), base, moving)
            loops.land(*arguments, total, *vectors_of, *step, flight.squares)
            done += count
        if done < len(piece):
            rest = slice(done, len(piece))
            v = None if velocity is None else velocity[rest]
            sent = torch.empty_like(shift[rest])
            message.read(part, number, start + done, shift[rest], sent)
            self._apply(shift[rest], sent, shared[rest], v, step, total, flight.squares)

    def _apply(
        self,
        shift: Tensor,
        sent: Tensor,
        shared: Tensor,
        velocity: Tensor | None,
        step: Step,
        total: float,
        squares: Squares,
    ) -> None:
        """Apply the sum of the updates in ``shift`` as ``kernels.apply_mean`` does."""
        shift.mul_(1 / total)
        loops = kernels_for(shift, sent, shared)
        if loops is not None and self.shared.error_feedback:
            loops.add_squared_norm(shift.numpy(), squares, 0)
            loops.add_squared_norm(sent.numpy(), squares, 1)
        elif self.shared.error_feedback:
            pair = torch.stack([torch.dot(shift, shift), torch.dot(sent, sent)])
            squares += pair.double().cpu().numpy()
        # Each product is rounded before it is added, as in the compiled loop.
        if velocity is not None:
            velocity.mul_(step.momentum).add_(shift)
            ahead = velocity * step.lookahead
            shift.mul_(step.direct).add_(ahead)
        else:
            shift.mul_(step.direct)
        shared.add_(shift)
        shift.sub_(sent)

    def landed(self, flight: Flight, *, take: bool = True) -> None:
        """Complete a landing: write the buffers, and update the counters."""
        state, view, worker = self.state, self.state.view, self.worker
        total = self.buffer_total(flight)
        for bucket, own, _ in flight.buffers:
            if not total or not take:
                continue
            mean = bucket.flat * (1 / total)
            if worker.model_version > flight.step and not self.shared.blocking and flight.weight:
                add_clamped(bucket.tensors, mean, own)
            else:
                bucket.unpack(total)
        self._flying.remove(flight)
        for part in flight.parts:
            part.flight = None
            if self.shared.blocking and take and total:
                part.synced_step = worker.step
            if len(self.parts) > 1:
                part.stream.release()
        number = len(flight.parts)
        view.landings += number
        view.fresh_step = max(view.fresh_step, flight.step)
        arrived = flight.arrived_seconds or flight.sent_seconds
        state.flight_seconds += number * (arrived - flight.sent_seconds)
        if self.shared.error_feedback:
            keep = (1 - 1 / (_SMOOTHED_PASSES * len(self.parts))) ** number
            mean_squared, sent_squared = flight.squares.tolist()
            sent, mean_ = worker.team.over_shards(sent_squared, mean_squared)
            view.sent_squared = keep * view.sent_squared + sent
            view.mean_squared = keep * view.mean_squared + mean_

    def buffer_total(self, flight: Flight) -> float:
        """Return the sum of the workers' weights, by which sums of buffers are divided."""
        return flight.total()

    def settle(self) -> None:
        """Land everything that is in flight."""
        while self._flying:
            self.land(self._flying[0])

    def outer_steps(self, parts: Sequence[Part], tally: Tally) -> list[Step]:
        """Return the outer step of each part."""
        outer, view = self.shared.outer, self.state.view
        if not (self.shared.error_feedback and outer.momentum):
            return [Step(outer.momentum, outer.lr, outer.lr * outer.momentum)] * len(parts)
        steps = [self.strategy.outer_step(view, part.index, tally) for part in parts]
        return [Step(momentum, 1.0, lookahead) for momentum, lookahead in steps]

    def next_parts(self, number: float) -> list[Part]:
        """Return the parts that are launched next, in cyclic order. ``inf``: all parts."""
        state, count = self.state, len(self.parts)
        number = count if number == math.inf else int(number)
        parts = [self.parts[(state.next_part + i) % count] for i in range(number)]
        state.next_part = (state.next_part + number) % count
        return parts

    # -- staleness -------------------------------------------------------------------------------

    def record_staleness(self) -> None:
        """Record the staleness at the end of a step."""
        worker, histogram = self.worker, self.state.staleness
        staleness = worker.record["staleness"] = worker.step - self.state.view.fresh_step
        histogram[staleness] = histogram.get(staleness, 0) + 1
        if staleness > worker.details.get("staleness_max", 0):
            worker.details["staleness_max"] = staleness

    def report(self) -> None:
        """Update ``Stats.details``."""
        state, view, details = self.state, self.state.view, self.worker.details
        details.update(parts=view.count, launches=view.launches, landings=view.landings)
        if not self.shared.blocking:
            details.update(
                landing_seconds=state.flight_seconds / max(1, view.landings),
                staleness_max=max(state.staleness, default=0),
                staleness_histogram=state.staleness,
            )

    # -- consensus and checkpoints ---------------------------------------------------------------

    @override
    def consensus(self, last: Round, *, final: bool) -> None:
        worker = self.worker
        if final:
            self.settle()
            self.report()
        for flight in self._flying:
            self._show(flight)
        if worker.size == 1:
            return
        what = f"{'final mean' if final else 'consensus'} at step {worker.step}"
        if final and self.precision not in (None, "bfloat16"):
            self._average_residuals(what)
            worker.exact_mean.average_buffers(1.0, worker.size, what=what)
            return
        worker.exact_mean.consensus(*self.consensus_weights(last), final=final, what=what)

    def consensus_weights(self, last: Round) -> tuple[float, float]:
        """Return this worker's weight in a consensus, and the sum of all workers' weights."""
        if self.precision is not None:
            # x − P may contain quantization errors even on a worker without new steps.
            return 1.0, float(self.worker.size)
        return last.own.weight, last.wait().weight

    def _average_residuals(self, what: str) -> None:
        """x ← P ← P + mean(x − P), where x − P is sent in int8.

        int8 is precise enough: its error is small compared to x − P, which is small compared to the
        model.
        """
        worker, size = self.worker, float(self.worker.size)
        flights = []
        for part in self.parts:
            message = make_message(worker.team, worker.wire.twin, "int8", [part.stream], what)
            flight = Flight([part], message, 1.0, lambda _: size, [Step()], worker.step)
            flight.work = self._packing(flight)
            for _ in flight.work:
                pass
            flight.handle = message.start(None)
            flights.append(flight)
        for flight in flights:  # if a worker is lost now, no part has changed
            assert flight.handle is not None
            flight.handle.wait()
        for flight in flights:
            for _ in self._moving(flight):
                pass
            for piece in flight.parts[0].slices:
                assert piece.space.P is not None
                piece.space.x.write(piece.start, piece.space.P[piece.start : piece.stop])

    @override
    def before_save(self, barrier: Callable[[], object]) -> None:
        if self.shared.eager:  # without a barrier the workers may be in different messages
            barrier()
        self.settle()
        state = self.state
        state.synced_steps = [part.synced_step for part in self.parts]
        state.saved_tally = [] if state.delayed is None else state.delayed.flat()

    @override
    def after_load(self) -> None:
        state = self.state
        for part, step in zip(self.parts, state.synced_steps, strict=True):
            part.synced_step = step
        state.delayed = Round.saved(state.saved_tally) if state.saved_tally else None


class RoundAverager(Averager):
    """Launches parts in rounds. They land at once, or after a fixed number of local steps.

    ``SharedModel.lands`` determines the order of the calls in a local step:

        blocking (lands=0)              after k steps (lands=k)
        gradients are ready             gradients are ready
          due, vote                       due, vote
        optimizers step                 optimizers step
                                          land parts of age k
          after_step                      after_step
          decide                          decide
          launch and land                 launch

    If ``due`` returns 0, the worker does not vote, and there is nothing to decide.
    """

    def __init__(self, strategy: Strategy, worker: Worker, shared: SharedModel) -> None:
        super().__init__(strategy, worker, shared)
        self._wanted = 0.0  # last return value of ``Strategy.due``
        self._report_non_finite = False  # True if a launch has found values that the vote lacked

    @override
    def gradients_ready(self, optimizer: AttachedOptimizer, *, last: bool) -> bool:
        super().gradients_ready(optimizer, last=last)
        if last:
            self._wanted = float(self.strategy.due(self.view_of(stepping=True)))
            if self._wanted > 0:
                self._pending = self.vote(0, stepping=True)
        return False

    @override
    def step_ended(self) -> bool:
        """Land, decide and launch; see the class. Returns True if a part landed."""
        view, landings, lands = self.state.view, self.state.view.landings, self.shared.lands
        assert isinstance(lands, int)
        if not self.shared.blocking:
            self.record_staleness()
            while self._flying and self.worker.step - self._flying[0].step >= lands:
                self.land(self._flying[0])
        if self._calls_after_step:
            self.strategy.after_step(self.view_of(stepping=True))
        round, self._pending = self._pending, None
        synced = round is not None and bool(self.act(round))
        self.report()
        return synced or view.landings > landings

    @override
    def vote(self, optimizer: int, *, stepping: bool, finishing: bool = False) -> Round:
        finite = self.check_finite(stepping=stepping) and not self._report_non_finite
        self._report_non_finite = False
        vote = self.rounds.vote(
            weight=self.weight(stepping=stepping),
            stepping=stepping,
            finishing=finishing,
            wanted=self._wanted if stepping else 0.0,
            finite=finite,
            numbers=self.strategy.vote(self.view_of(stepping=stepping)),
        )
        return self.rounds.send(vote)

    def weight(self, *, stepping: bool) -> float:
        """Return this worker's weight in the mean of the coming round."""
        return float(stepping or self.unsynced)

    @override
    def is_finite(self, optimizer: int, *, stepping: bool) -> bool:
        """Return False if this worker's contribution is known to be non-finite.

        If the worker takes no step, this checks the model, else the gradients (unless a GradScaler
        does) and the buffers. If the previous step was not checked, it also checks the parameters.
        """
        state, worker = self.state, self.worker
        unchecked, state.checked_step = worker.step - state.checked_step > 1, worker.step
        if not stepping:
            return worker.finite_model()
        if self.strategy.gradient_norm:
            finite = worker.scaled or math.isfinite(state.view.gradient_norm_squared)
        else:
            finite = worker.finite_gradients(worker.optimizers)
        return finite and (worker.finite_model() if unchecked else worker.finite_buffers())

    @override
    def decide(self, round: Round) -> bool:
        """Launch the parts that the strategy chooses. If workers wait for the mean, also land."""
        state, view = self.state, self.state.view
        chosen: Round | None = round
        if self.strategy.tally_delay:
            chosen, state.delayed = state.delayed, round
        view.rounds += 1
        if chosen is None:
            return False
        view = self.view_of(stepping=round.own.stepping)
        number = self.strategy.decide(view, chosen.tally())
        if not number:
            return False
        view.rounds, landings = 0, view.landings
        for part in self.next_parts(number):
            while part.flight is not None:  # the older ones first, as on all workers
                self.land(self._flying[0])
            self._launch(part, round)
        while self.shared.blocking and self._flying:
            self.land(self._flying[0])
        return view.landings > landings

    def _launch(self, part: Part, round: Round) -> None:
        flight = self.begin(
            [part],
            round.own.weight,
            lambda _: round.wait().weight,
            lambda: self.outer_steps([part], round.tally()),
        )
        for _ in flight.work:
            pass
        if not self.check_launch(flight):
            self._report_non_finite = True
        self.send(flight)


class ClockedAverager(Averager):
    """Launches parts as soon as earlier ones have landed, without a vote.

    A *message* contains one or several parts. All workers launch the same sequence of messages, and
    each has at most one in flight. A worker launches the next one at the end of the local step in
    which the previous one has landed. The sum starts when the last worker has launched it. The vote
    of a worker travels in its message, so the sum of the votes is known when the message lands,
    which is before this worker launches the next one. Contents and outer step of the next message
    depend on these sums only, so they are equal on all workers.

    At the end of a step a worker may wait for a message that is about to arrive. It then launches
    the next one in this step, and not in the next one. So the workers stay in phase.

    At a barrier a worker continues to launch and land, with ``stepping=False``. The barrier ends
    with the first message that no stepping worker has launched. All workers were at the barrier
    when they launched it, and none has launched a later one.

    The training thread packs and lands at most ``_BOUNDARY_SHARE`` of a step, or one piece, at a
    step boundary. A background thread adds up the updates and moves P and v.
    """

    votes_between_steps = True

    def __init__(self, strategy: Strategy, worker: Worker, shared: SharedModel) -> None:
        super().__init__(strategy, worker, shared)
        self.pace = Pace(shared.patience)

    @override
    def start(self, common: dict[str, Any] | None = None) -> None:
        super().start(common)
        self._flight_steps = math.inf  # from sending to arrival of the newest landed message
        numbers = (0.0,) * len(self.strategy.vote(self.view_of(stepping=False)))
        self.vote_length = Vote.SLOTS + len(numbers)
        self._measured = 0  # number of parts in the newest message that has landed
        self._sums = Sums(0.0, 0, 0, 0.0, numbers=numbers)  # of that message

    # -- steps -----------------------------------------------------------------------------------

    @override
    def step_ended(self) -> bool:
        """Land and launch what can be landed and launched. Returns True if a part landed."""
        view, worker, pace = self.state.view, self.worker, self.pace
        host, landings = worker.team.host, view.landings
        self.record_staleness()
        pace.step_ended(host.now())
        if worker.size > 1:
            self._advance(arrived=self._wait_a_moment())
            while worker.step - view.fresh_step >= self.shared.bound:
                self._complete(self._flying[0] if self._flying else self._begin(stepping=True))
                self._advance(arrived=False)
            self.report()
        if self._calls_after_step:
            self.strategy.after_step(self.view_of(stepping=True))
        pace.step_begins(host.now())
        return view.landings > landings

    def _wait_a_moment(self) -> bool:
        """Wait for a message that is about to arrive. Returns True if one has arrived.

        The processes of a node agree on the result, and on ``credit_seconds``.
        """
        team, pace, arrived, waited, in_vain = self.worker.team, self.pace, False, 0.0, False
        flight = self._flying[0] if self._flying else None
        if flight is not None and flight.moved is not None:
            moved, limit = flight.moved, pace.wait_seconds()
            expected = self.state.sizer.steps * pace.step_seconds
            missing = expected - (team.host.now() - flight.sent_seconds)
            if limit and missing < limit and not moved.done():
                what = f"a message at step {self.worker.step}"
                waited = team.wait_while(lambda: not moved.done(), limit, what)
                in_vain = not moved.done()
            arrived = moved.done()
        late, waited, in_vain_, debt = team.agree(
            float(not arrived), waited, float(in_vain), -pace.credit_seconds
        )
        pace.waited(waited, in_vain=bool(in_vain_))
        pace.credit_seconds = -debt
        return not late

    def _advance(self, *, arrived: bool) -> None:
        """Land the message in flight if it has arrived, and launch the next one, within limits."""
        host, node = self.worker.team.host, self.worker.team.node
        may_launch = self.pace.credit_seconds >= 0  # before the landing: a node has agreed on it
        seconds = math.inf if node else _BOUNDARY_SHARE * self.pace.step_seconds
        deadline = host.processor_seconds() + seconds
        flight = self._flying[0] if self._flying else None
        if flight is not None and flight.handle is not None:
            if not arrived:
                return
            self._receive(flight)
            if not self._work(flight, deadline):
                return
            self.landed(flight)
            flight = None
        if flight is None:
            if not (may_launch and self._due()):
                return
            flight = self._begin(stepping=True)
        if self._work(flight, deadline):
            self._send(flight)

    def _work(self, flight: Flight, deadline: float) -> bool:
        """Pack or land pieces until ``deadline``, at least one. Returns True if all are done."""
        host = self.worker.team.host
        began = host.processor_seconds()
        while True:
            done = next(flight.work, flight) is flight
            now = host.processor_seconds()
            if done or now >= deadline:
                self.pace.credit_seconds -= now - began
                return done

    def _complete(self, flight: Flight) -> None:
        """Send a message if it was not sent, wait for it, and land it."""
        if flight.handle is None:
            self._work(flight, math.inf)
            self._send(flight)
        assert flight.moved is not None
        flight.moved.wait()
        self._receive(flight)
        self._work(flight, math.inf)
        self.landed(flight)

    def _due(self) -> bool:
        return self.strategy.due(self.view_of(stepping=True)) > 0

    # -- messages --------------------------------------------------------------------------------

    def _vote(self, *, stepping: bool, finishing: bool = False) -> Vote:
        return self.rounds.vote(
            weight=float(stepping or self.unsynced),
            stepping=stepping,
            finishing=finishing,
            wanted=self._flight_steps if stepping else math.inf,
            finite=True,
            numbers=self.strategy.vote(self.view_of(stepping=stepping)),
        )

    def _begin(self, *, stepping: bool, finishing: bool = False) -> Flight:
        """Begin the next message."""
        sums, view = self._sums, self.view_of(stepping=stepping)
        tally = Tally(lambda: (sums.stepping, sums.wanted, sums.numbers))
        number = self.strategy.decide(view, tally)
        parts = self.next_parts(self.state.sizer.number if number == math.inf else number)
        steps = self.outer_steps(parts, tally)
        vote = self._vote(stepping=stepping, finishing=finishing)
        size = self.worker.size
        flight = self.begin(parts, vote.weight, lambda flight: _total(flight, size), steps)
        flight.vote = vote
        return flight

    def _send(self, flight: Flight) -> None:
        worker, team, vote = self.worker, self.worker.team, flight.vote
        assert vote is not None
        finite = self.check_launch(flight)
        if not vote.stepping and not worker.finite_model():
            finite = False
        if not finite:
            worker.details["non_finite"] = worker.details.get("non_finite", 0) + 1
        flight.vote = vote = replace(vote, finite=finite)
        self.send(flight, vote.encode())
        assert flight.handle is not None
        # The check holds neither this object nor the worker, which a waiting thread would keep.
        self_check, step, size, host = self.check, worker.step, worker.size, team.host

        def move(_: object) -> Handle[None]:
            flight.arrived_seconds, began = host.now(), host.processor_seconds()
            votes = flight.message.votes
            sums = vote.tally([sum(column) for column in zip(*votes, strict=True)], size)
            flight.sums = self_check(sums, step)
            flight.fastest = min(each[4] for each in votes)
            self.move(flight)
            flight.background_seconds = host.processor_seconds() - began
            return Completed(None)

        like = (
            self.parts[0].slices[0].space.x.tensors[0] if self.parts[0].slices else torch.empty(0)
        )
        moving = team.movers.start(flight.handle, move, what=flight.message.what, like=like)
        flight.moved = team.communicator.timed(moving)

    def _receive(self, flight: Flight) -> None:
        """Prepare the landing of a message that has arrived. Called again, it does nothing."""
        if flight.received:
            return
        flight.received = True
        pace, state = self.pace, self.state
        assert flight.moved is not None
        flight.moved.wait()
        for _, _, handle in flight.buffers:
            handle.wait()
        assert flight.sums is not None
        self._sums = flight.sums
        flight.work = self.adding(flight)
        pace.credit_seconds -= flight.background_seconds
        self.syncs += 1
        if pace.step_seconds and flight.arrived_seconds is not None:
            seconds = flight.arrived_seconds - flight.sent_seconds
            (self._flight_steps,) = self.worker.team.agree(seconds / pace.step_seconds)
        # What the workers have measured of the previous message came with this one.
        if math.isfinite(flight.fastest) and self._measured:
            state.sizer.measure(flight.fastest, self._measured)
        self._measured = len(flight.parts)

    @override
    def buffer_total(self, flight: Flight) -> float:
        assert flight.sums is not None
        return flight.sums.weight

    @override
    def consensus_weights(self, last: Round) -> tuple[float, float]:
        # The models are equal to P after the last message, apart from errors of rounding.
        return 1.0, float(self.worker.size)

    @override
    def report(self) -> None:
        super().report()
        self.worker.details.update(message_parts=self.state.sizer.number)

    # -- barrier ---------------------------------------------------------------------------------

    @override
    def wait_for_all(self, order: Sequence[int], *, finishing: bool) -> Round:
        worker = self.worker
        self.pace.interrupted()
        if worker.size == 1:
            return super().wait_for_all(order, finishing=finishing)
        warning = None if finishing else WaitingWarning(worker)
        while self._flying:
            self._complete(self._flying[0])
        while True:
            flight = self._begin(stepping=False, finishing=finishing)
            self._complete(flight)
            assert flight.sums is not None
            assert flight.vote is not None
            if not flight.sums.stepping:
                worker.record.clear()
                return Round(0, flight.vote, Completed(flight.sums))
            if warning is not None:
                warning(flight.sums)

    @override
    def vote(self, optimizer: int, *, stepping: bool, finishing: bool = False) -> Round:
        """Return a round of a single worker, which has nothing to send."""
        return self.rounds.send(self._vote(stepping=stepping, finishing=finishing))

    @override
    def decide(self, round: Round) -> bool:
        return False


def _total(flight: Flight, workers: int) -> float:
    """Return the number by which the sum of the updates of a message is divided.

    What is left at a barrier counts as in the final mean, in which every worker has the weight 1.
    """
    assert flight.sums is not None
    if not flight.sums.stepping and flight.sums.weight:
        return float(workers)
    return flight.sums.weight
