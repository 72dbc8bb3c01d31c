"""Averaging of models: how parts of the global model are launched and landed.

Each worker trains a *local model* x. All workers share a model P, which has the same bits on each
of them. P is cut into *parts*. To *launch* a part, every worker sends its update u, and when the
sum of the updates has arrived, the part *lands*:

    launch:   u = C(x − P)              C quantizes; the quantization error stays in x − P
    sum:      D = Σ w·u / Σ w           w: 1, or 0 for a worker without new steps
    landing:  v ← μ·v + D               only with an outer momentum μ
              Δ = c·D + a·v
              P ← P + Δ
              x ← x + Δ − u             the local steps since the launch stay in x

A strategy chooses when parts are launched, how late they land, and the factors μ, c and a of the
*outer step*, the step of P along D. P is not stored if all workers wait for each mean, the mean is
exact and the outer step is P ← P + D. Then u is x, and x becomes the mean.

``RoundAverager`` launches parts in *rounds*: the workers vote, and the strategy decides.
``ClockedAverager`` (``clocked.py``) needs no votes before a launch: the landing of one message
starts the next. ``flight.py`` computes the formulas, and ``flat.py`` stores P and v.

Invariants:

1. A part is in at most one message. So x − P changes by local steps and by −u at landings only.
2. All workers launch the same parts in the same order, with the same μ, c and a. So P changes by
   the same bytes on all of them.
3. A worker at a barrier launches and lands like the others, so they do not wait for it.
"""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from typing_extensions import override

from offbeat.averaging.flat import Share, Slice, Space, cut, make_spaces
from offbeat.averaging.flight import Flight, OuterStep, Part, sections_of
from offbeat.averaging.flow import Flow
from offbeat.averaging.model_mean import BufferMean
from offbeat.averaging.pace import Sizer
from offbeat.averaging.shares import exchange_shares
from offbeat.averaging.votes import Round, Vote, summed_votes
from offbeat.averaging.worker import AttachedOptimizer, Worker
from offbeat.quantization.block_format import BLOCK
from offbeat.quantization.message import (
    SINGLE_STAGE_WORKERS,
    ExactMessage,
    Message,
    QuantizedMessage,
    Section,
)
from offbeat.strategies.base import GlobalModel, Strategy, SummedVotes, WorkerView

_SMOOTHED_PASSES = 5
"""Decay time of the running sums of ‖u‖² and ‖D‖², in passes over all parts."""


@dataclass
class AveragerState:
    """State of an ``Averager``. A checkpoint contains it when nothing is in flight.

    Attributes:
        shared: P, one tensor for each dtype and device of the parameters. Empty if not stored.
        velocity: v, like ``shared``.
        errors: Quantization errors of the sums, like ``shared``, see ``Stream``; then the rounding
            errors of x, see ``Space``.
        view: The data about this worker that the strategy may read.
        landings: Number of parts that have landed in this generation.
        launch_step: Local step of the newest launch, initially the first step of the generation.
        fresh_step: Local step at which the newest landed part was launched, initially the first
            step of the generation.
        synced_steps: ``Part.synced_step`` of each part.
        next_part: Index of the part that is launched next.
        checked_step: Local step of the last check for non-finite values.
        staleness: Histogram: for each staleness, the number of local steps that ended with it.
        flight_seconds: Seconds from launch to arrival, summed over all landings.
        sizer: Chooses the number of parts in a message. Only used by ``ClockedAverager``.
    """

    shared: list[Tensor]
    velocity: list[Tensor]
    errors: list[Tensor]
    view: WorkerView
    sizer: Sizer
    landings: int = 0
    launch_step: int = 0
    fresh_step: int = 0
    synced_steps: list[int] = field(default_factory=list)
    next_part: int = 0
    checked_step: int = 0
    staleness: dict[int, int] = field(default_factory=dict)
    flight_seconds: float = 0.0


class Averager(Flow):
    """Averages models for a strategy; see the module's docstring.

    A subclass decides when parts are launched and landed.
    """

    state: AveragerState
    vote_length = 0
    """Number of numbers in a vote that is sent with a message."""
    stores_shared = False
    """True if P is stored in any case."""

    def __init__(self, strategy: Strategy, worker: Worker, averages: GlobalModel) -> None:
        super().__init__(strategy, worker)
        self.averages = averages
        self.waits = averages.blocking and averages.outer.plain and worker.wire.exact
        self.measures = averages.gradient_norm
        self._calls_after_step = type(strategy).after_step is not Strategy.after_step
        self._squared: dict[int, float] = {}  # ‖g‖² of this step, by index of the optimizer
        self._flying: list[Flight] = []  # the oldest first

    @override
    def start(self) -> None:
        worker = self.worker
        self._flying.clear()
        self._make_parts()
        view = worker.strategy_view()
        view.count = len(self.parts)
        view.state = self.strategy.state(view)
        self.state = AveragerState(
            [space.P for space in self.spaces if space.P is not None],
            [space.v for space in self.spaces if space.v is not None],
            [e for s in self.spaces for e in (s.stream.errors, s.error) if e is not None],
            view,
            Sizer(len(self.parts), bound=self.averages.bound),
            launch_step=worker.step,
            fresh_step=worker.step,
            checked_step=worker.step,
        )
        self.update_details()

    def _make_parts(self) -> None:
        """Allocate P and v, and cut the model into parts.

        If a node has several copies of the model, each process averages one share of each part, and
        stores P and v of this share only. It knows the slices of all shares, to exchange them.
        """
        worker, averages = self.worker, self.averages
        team, wire, several = worker.team, worker.wire, worker.size > 1
        # With ``error_feedback`` the outer step makes up for a mean shorter than the updates,
        # so a single worker takes none. An exact mean of whole models needs no P.
        outer = not averages.outer.plain and (several or not averages.error_feedback)
        inexact = several and (not wire.exact or averages.eager)
        self._stores = self.stores_shared or outer or inexact
        velocity = outer and averages.outer.momentum > 0
        place = team.node.inside.rank if team.node is not None and team.models_per_node > 1 else 0
        spaces = [
            make_spaces(
                [parameter for _, parameter in worker.replica.parameters],
                shared=self._stores and index == place,
                velocity=velocity and index == place,
                stored=averages.stored,
                share=Share(index, team.models_per_node),
            )
            for index in range(team.models_per_node)
        ]
        self.spaces = spaces[place]
        for space in self.spaces if several or outer else ():
            space.make_error()
        elements = sum(space.x.elements for space in self.spaces)
        (exact,) = team.maximum_over_node(float(not wire.saves(elements, 4) and elements > 0))
        self.precision: str | None = None if wire.exact or exact else wire.precision
        self.make_errors()
        slices_of = [self._cut(each) for each in spaces]
        # The processes of a node sum a part together, so all need the same number of parts.
        number = int(team.maximum_over_node(max(map(len, slices_of)))[0])
        for each in slices_of:
            each += [[] for _ in range(number - len(each))]
        self._slices_of = slices_of
        self.parts = [
            Part(index, slices, worker.step) for index, slices in enumerate(slices_of[place])
        ]

    def _cut(self, spaces: Sequence[Space]) -> list[list[Slice]]:
        """Return the slices of each part."""
        worker, parts = self.worker, self.averages.parts
        size = sum(space.x.elements * space.x.tensors[0].itemsize for space in spaces)
        (largest,) = worker.team.maximum_over_node(size)
        number = parts(round(largest)) if callable(parts) else parts
        # A quantized sum in two stages (``quantization/message.py``) gives each worker equally many
        # blocks of each part to add up.
        owners = 1 if worker.size <= SINGLE_STAGE_WORKERS else worker.size
        return cut(spaces, number, 1 if self.precision is None else BLOCK * owners)

    def make_errors(self) -> None:
        """Allocate the quantization errors of sums, if there are any."""
        if self.precision is not None and self.worker.size > SINGLE_STAGE_WORKERS:
            for space in self.spaces:
                space.stream.make_errors(self.worker.size)

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
        view.since_launch = worker.step - self.state.launch_step
        return view

    @override
    def measure(self, optimizer: AttachedOptimizer) -> None:
        self._squared[optimizer.index] = self.worker.squared_norm(optimizer.gradients())

    @override
    def gradients_ready(self, optimizer: AttachedOptimizer, *, last: bool) -> bool:
        if last and self.measures:
            self._sum_squares()
        return False

    def _sum_squares(self) -> None:
        self.state.view.gradient_norm_squared = sum(self._squared.values())
        self._squared.clear()

    @override
    def step_skipped(self) -> None:
        step = self.worker.step
        for part in self.parts:
            if part.synced_step == step - 1:
                part.synced_step = step

    # -- launching -------------------------------------------------------------------------------

    def begin_launch(
        self,
        parts: Sequence[Part],
        weight: float,
        total: Callable[[], float],
        steps: list[OuterStep] | Callable[[], list[OuterStep]],
    ) -> Flight:
        """Begin a launch. The caller then runs ``Flight.work`` (it packs u), and calls ``send``."""
        view, worker = self.state.view, self.worker
        view.launches += len(parts)
        self.state.launch_step = worker.step
        numbers = ", ".join(str(part.index) for part in parts)
        what = f"launch {view.launches} (part {numbers}) at step {worker.step}"
        sections = sections_of(parts)
        message = self.make_message([each.section() for each in sections], what)
        exact = self.precision is None
        flight = Flight([*parts], sections, message, weight, total, steps, worker.step, exact)
        flight.measures = self.averages.error_feedback
        self.update_details()
        for space in self.spaces:
            space.x.refresh()
        flight.work = flight.pack(check=exact and worker.size > 1, mark=not self.averages.blocking)
        for part in parts:
            part.flight = flight
        self._flying.append(flight)
        return flight

    def make_message(self, sections: Sequence[Section], what: str) -> Message:
        """Return a new message. A subclass may use another kind of message."""
        worker = self.worker
        if self.precision is None:
            return ExactMessage(worker.team, sections, what, keep=not self.averages.blocking)
        return QuantizedMessage(worker.wire, sections, what, vote=self.vote_length)

    def check_launch(self, flight: Flight) -> Tensor | bool:
        """Set and return ``Flight.finite``: False if NaN or infinity is in it, on any shard.

        Outside of a node no host waits for a GPU.
        """
        worker = self.worker
        if self._stores and worker.size > 1:
            buffers = worker.finite_buffers_here() if self.sends_buffers(flight) else True
            flags = flight.finite, flight.message.finite(), buffers
            # Each "and" of tensors is a kernel on a GPU.
            unknown = [flag for flag in flags if flag is not True]
            finite = functools.reduce(operator.and_, unknown) if unknown else True
            if worker.team.node is not None:
                (wrong,) = worker.team.maximum_over_node(float(not finite))
                finite = not wrong
            flight.finite = finite
        return flight.finite

    def sends_buffers(self, flight: Flight) -> bool:
        """Return True if the floating-point buffers are averaged with this launch."""
        return self.parts[-1] in flight.parts

    def send(self, flight: Flight, vote: Tensor | None = None) -> None:
        """Send the message, and the buffers with the last part of the model.

        If the message is not finite, the worker sends zeros under the policy "raise". It must send,
        because its vote may have announced a weight above 0.
        """
        worker = self.worker
        send = flight.finite if worker.guarded else True
        if self.sends_buffers(flight):
            weight = 0.0 if send is False else flight.weight
            what = f"buffers with {flight.message.what}"
            flight.buffers = BufferMean(worker.team, worker.replica, weight, worker.step, what=what)
        flight.future = flight.message.start(vote, send)
        flight.sent_seconds = worker.team.host.now()

    # -- landing ---------------------------------------------------------------------------------

    def land(self, flight: Flight, *, take: bool = True) -> None:
        """Wait for a message, then move P and the local model. A failed message changes nothing.

        ``take`` False discards the mean, which is allowed only if P is not stored.
        """
        assert flight.future is not None
        worker = self.worker
        flight.future.wait()
        if flight.buffers is not None:
            flight.buffers.wait()
        if flight.arrived_seconds is None:
            flight.arrived_seconds = worker.team.host.now()
        if take and flight.total() > 0:
            # Without local steps since the launch x ← P, with the same bits on all workers.
            unmoved = self.averages.blocking or worker.model_version <= flight.step
            flight.move_and_add(overwrite=unmoved)
        self.finish_landing(flight, take=take)

    def finish_landing(self, flight: Flight, *, take: bool = True) -> None:
        """Complete a landing: write the buffers, and update the counters."""
        state, view, worker = self.state, self.state.view, self.worker
        total = self.buffer_total(flight)
        if total and take:
            self._share(flight.parts)
            if flight.buffers is not None:
                flight.buffers.write(total, worker.model_version)
        self._flying.remove(flight)
        for part in flight.parts:
            part.flight = None
            if self.averages.blocking and take and total:
                part.synced_step = worker.step
        number = len(flight.parts)
        state.landings += number
        state.fresh_step = max(state.fresh_step, flight.step)
        arrived = flight.arrived_seconds or flight.sent_seconds
        state.flight_seconds += number * (arrived - flight.sent_seconds)
        if self.averages.error_feedback:
            keep = (1 - 1 / (_SMOOTHED_PASSES * len(self.parts))) ** number
            mean_squared, sent_squared = flight.squares.tolist()
            sent, mean = worker.team.sum_over_node(sent_squared, mean_squared)
            before = view.squares
            view.squares = keep * before[0] + sent, keep * before[1] + mean
        self.update_details()

    def _share(self, parts: Sequence[Part]) -> None:
        """Exchange the averaged shares of ``parts`` within the node, if it has several. Blocks."""
        node = self.worker.team.node
        if node is not None and len(self._slices_of) > 1:
            exchange_shares(node.inside, self._slices_of, [part.index for part in parts])

    def buffer_total(self, flight: Flight) -> float:
        """Return the sum of the workers' weights in the mean of the buffers."""
        return flight.total()

    def land_all(self) -> None:
        """Land everything that is in flight."""
        while self._flying:
            self.land(self._flying[0])

    def outer_steps(self, parts: Sequence[Part], votes: SummedVotes) -> list[OuterStep]:
        """Return the outer step of each part."""
        outer, view = self.averages.outer, self.state.view
        if not (self.averages.error_feedback and outer.momentum):
            lr = outer.lr(view.size) if callable(outer.lr) else outer.lr
            return [OuterStep(outer.momentum, lr, lr * outer.momentum)] * len(parts)
        steps = [self.strategy.outer_step(view, part.index, votes) for part in parts]
        return [OuterStep(momentum, 1.0, lookahead) for momentum, lookahead in steps]

    def next_parts(self, number: float) -> list[Part]:
        """Return the parts that are launched next, in cyclic order. ``inf``: all parts."""
        state, count = self.state, len(self.parts)
        number = count if number == math.inf else number
        if number not in range(1, count + 1):
            name = type(self.strategy).__name__
            raise ValueError(
                f"{name}.decide returned {number}: return a whole number of parts, at most "
                f'{count}, or inf; with lands="arrived" at least 1'
            )
        number = int(number)
        parts = [self.parts[(state.next_part + i) % count] for i in range(number)]
        state.next_part = (state.next_part + number) % count
        return parts

    # -- staleness -------------------------------------------------------------------------------

    def record_staleness(self) -> None:
        """Record the staleness at the end of a step."""
        worker, histogram = self.worker, self.state.staleness
        staleness = worker.record["staleness"] = worker.step - self.state.fresh_step
        histogram[staleness] = histogram.get(staleness, 0) + 1
        if staleness > worker.details.get("staleness_max", 0):
            worker.details["staleness_max"] = staleness

    def update_details(self) -> None:
        """Update ``Stats.details`` after a launch or a landing."""
        state, view, details = self.state, self.state.view, self.worker.details
        details.update(parts=view.count, launches=view.launches, landings=state.landings)
        if not self.averages.blocking:
            details.update(
                landing_seconds=state.flight_seconds / max(1, state.landings),
                staleness_max=max(state.staleness, default=0),
                staleness_histogram=state.staleness,
            )

    # -- consensus and checkpoints ---------------------------------------------------------------

    @override
    def consensus(self, last: Round, *, final: bool) -> None:
        worker = self.worker
        if final:
            self.land_all()
        for flight in self._flying:
            flight.preview()
            self._share(flight.parts)
        if worker.size == 1:
            return
        what = f"{'final mean' if final else 'consensus'} at step {worker.step}"
        worker.model_mean.consensus(*self.consensus_weights(last), final=final, what=what)

    def consensus_weights(self, last: Round) -> tuple[float, float]:
        """Return this worker's weight in a consensus, and the sum of all workers' weights."""
        total = last.wait().weight
        feedback = self.precision is not None or self.averages.error_feedback
        if feedback or not (total or self.averages.blocking):
            # Without new steps x may differ from P: by quantization errors, or by the rounding of
            # x + Δ − u.
            return 1.0, float(self.worker.size)
        return last.own.weight, total

    @override
    def before_save(self) -> None:
        self.land_all()
        for space in self.spaces:
            if space.x.device.type == "cuda":  # the host reads P and v, if it stores them
                torch.cuda.synchronize(space.x.device)
        self.state.synced_steps = [part.synced_step for part in self.parts]

    @override
    def after_load(self) -> None:
        for part, step in zip(self.parts, self.state.synced_steps, strict=True):
            part.synced_step = step
        self.update_details()


class RoundAverager(Averager):
    """Launches parts in rounds. They land at once, or after a fixed number of local steps.

    ``GlobalModel.lands`` determines the order of the calls in a local step:

        blocking (lands=0)              after k steps (lands=k)
        gradients are ready             gradients are ready
          due, vote                       due, vote
        optimizers step                 optimizers step
                                          land parts of age k
          after_step                      after_step
          decide                          decide
          launch and land                 launch

    If ``due`` returns False, the worker does not vote, and there is nothing to decide.
    """

    def __init__(self, strategy: Strategy, worker: Worker, averages: GlobalModel) -> None:
        super().__init__(strategy, worker, averages)
        self._report_non_finite = False  # a launch had NaN or infinity; the next vote reports it

    @override
    def gradients_ready(self, optimizer: AttachedOptimizer, *, last: bool) -> bool:
        if last:
            if self.measures:
                self._sum_squares()
            if self.strategy.due(self.view_of(stepping=True)):
                self._pending = self.vote(0, stepping=True)
        return False

    @override
    def step_ended(self) -> bool:
        """Land, decide and launch; see the class. Returns True if a part landed."""
        state, landings, lands = self.state, self.state.landings, self.averages.lands
        assert isinstance(lands, int)
        if not self.averages.blocking:
            self.record_staleness()
            while self._flying and self.worker.step - self._flying[0].step >= lands:
                self.land(self._flying[0])
        if self._calls_after_step:
            self.strategy.after_step(self.view_of(stepping=True))
        round, self._pending = self._pending, None
        synced = round is not None and self.act(round)
        return synced or state.landings > landings

    @override
    def vote(self, optimizer: int, *, stepping: bool) -> Round:
        finite = self.check_finite(stepping=stepping) and not self._report_non_finite
        self._report_non_finite = False
        vote = Vote(
            weight=self.weight(stepping=stepping),
            stepping=stepping,
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

        Without a step, checks the model. With a step, checks the buffers and the gradients (a
        GradScaler may check these instead), and the parameters if the last step was unchecked.
        """
        state, worker = self.state, self.worker
        unchecked, state.checked_step = worker.step - state.checked_step > 1, worker.step
        if not stepping:
            return worker.finite_model()
        if self.measures:
            finite = worker.scaled or math.isfinite(state.view.gradient_norm_squared)
        else:
            finite = worker.finite_gradients(worker.optimizers)
        return finite and (worker.finite_model() if unchecked else worker.finite_buffers())

    @override
    def decide(self, round: Round) -> bool:
        """Launch the parts that the strategy chooses. If workers wait for the mean, also land."""
        view = self.view_of(stepping=bool(round.own.stepping))
        number = self.strategy.decide(view, summed_votes(round.sums))
        if not number:
            return False
        landings = self.state.landings
        for part in self.next_parts(number):
            while part.flight is not None:  # all workers land in launch order
                self.land(self._flying[0])
            self._launch(part, round)
        while self.averages.blocking and self._flying:
            self.land(self._flying[0])
        return self.state.landings > landings

    def _launch(self, part: Part, round: Round) -> None:
        flight = self.begin_launch(
            [part],
            round.own.weight,
            lambda: round.wait().weight,
            lambda: self.outer_steps([part], summed_votes(round.sums)),
        )
        for _ in flight.work:
            pass
        flight.finite = bool(self.check_launch(flight))
        if not flight.finite:
            self._report_non_finite = True
            if self.worker.guarded:
                flight.message.clear()
        self.send(flight)
