"""The flow of strategies that share a model: rounds, launches, landings, consensus.

Order of the calls in one local step, by when parts land:

    blocking (lands=0)              after k steps (lands=k)         on arrival (lands="arrived")
    gradients are ready             gradients are ready             gradients are ready
      due                             due
      look for non-finite values      look for non-finite values
      vote, sent                      vote, sent
    optimizers step                 optimizers step                 optimizers step
                                      land what is k steps old        agree inside the node
                                                                      land what has arrived
      after_step                      after_step                      after_step
                                                                      launch queued parts
                                                                      no round in progress: due, vote
      decide                          decide                          tally has arrived: decide
      launch and land                 launch                          launch; due, vote

A worker without data votes with ``stepping=False`` in the same rounds, and launches and lands in
the same order, so that all workers start the same operations.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from typing_extensions import override

from offbeat.averaging.carried_state import common_values, keep_local_values, load_common_values
from offbeat.averaging.flow import Flow, tally_of
from offbeat.averaging.landing import Landing
from offbeat.averaging.part import Part
from offbeat.averaging.shared_model import make_parts, view_of
from offbeat.averaging.votes import Round
from offbeat.averaging.worker import AttachedOptimizer, Worker
from offbeat.checkpoint import transient
from offbeat.errors import OffbeatError
from offbeat.fabric import Completed
from offbeat.strategies.base import Precision, SharedModel, Strategy, WorkerView

_SMOOTHED_PASSES = 5  # passes of the model over which ‖u‖² and ‖D‖² are smoothed


@dataclass(frozen=True)
class QueuedLaunch:
    """A part that a round has decided to launch.

    Attributes:
        part: Its index.
        round: The round.
        precision: Precision of the part. None: that of the wire.
    """

    part: int
    round: Round
    precision: Precision | None


@dataclass
class ModelFlowState:
    """What a checkpoint holds of the flow.

    Attributes:
        parts: The parts of the shared model.
        view: What the strategy sees.
        next_part: Index of the part that is launched next.
        in_flight: Indices of the parts in flight, the oldest first.
        fresh_step: Local step of the newest launch that has landed.
        checked_step: Local step of the last look for non-finite values.
        flight_seconds: Sum over all landings of the time from launch to arrival.
        staleness: Number of steps that ended so many local steps after ``fresh_step``.
        saved_tally: ``delayed`` in a checkpoint.
        delayed: The round before, for a strategy with ``tally_delay``.
        queue: Launches that were decided and wait for their part to land.
    """

    parts: list[Part]
    view: WorkerView
    next_part: int = 0
    in_flight: list[int] = field(default_factory=list)
    fresh_step: int = 0
    checked_step: int = 0
    flight_seconds: float = 0.0
    staleness: dict[int, int] = field(default_factory=dict)
    saved_tally: list[float] = field(default_factory=list)
    delayed: Round | None = transient(default=None)
    queue: list[QueuedLaunch] = transient(default_factory=list)


class ModelFlow(Flow):
    """Shares a model; see ``SharedModel``.

    Args:
        strategy: The strategy.
        worker: This worker.
        shared: What ``strategy.averages()`` returned.
    """

    state: ModelFlowState

    def __init__(self, strategy: Strategy, worker: Worker, shared: SharedModel) -> None:
        super().__init__(strategy, worker)
        self.shared = shared
        self.votes_between_steps = shared.eager
        self.uses_gradients = strategy.gradient_norm
        self.waits = shared.blocking and shared.outer.plain
        # Second stages of quantized sums start during backward, too.
        self.wants_buckets = not worker.wire.exact and not shared.blocking
        self._votes = 0  # numbers of the strategy in a vote
        self._wanted = 0.0  # what the strategy has answered to ``due``
        self._squared = 0.0  # ‖g‖² of the optimizers whose gradients are ready
        self._pausing = False
        self._spent: list[float] = []  # seconds on launches and landings since the last boundary
        self._arrived: int | None = None  # oldest parts that have arrived on the whole node
        self._tally_arrived = False  # on the whole node
        self._report_non_finite = False  # values found after the last vote; the next reports them

    @override
    def start(self, common: dict[str, Any] | None = None) -> None:
        worker = self.worker
        parts = make_parts(worker, self.shared)
        view = view_of(worker, count=len(parts))
        if common is not None:
            view.start_step = common["step"]
        view.state = self.strategy.state(view)
        if common is not None:
            load_common_values(view.state, common["state"])
        self.state = ModelFlowState(parts, view, fresh_step=worker.step, checked_step=worker.step)
        self._votes = len(self.strategy.vote(self._see(stepping=False)))

    @override
    def keep_local(self, before: Flow) -> None:
        assert isinstance(before, ModelFlow)
        keep_local_values(self.state.view.state, before.state.view.state)

    @override
    def common_values(self) -> dict[str, Any]:
        state = common_values(self.state.view.state)
        return {"step": self.worker.step, "state": state}

    @property
    @override
    def unsynced(self) -> bool:
        step = self.worker.step
        return self.worker.touched or any(step > part.synced_step for part in self.state.parts)

    def _see(self, *, stepping: bool) -> WorkerView:
        """The strategy's view, up to date."""
        state, view, worker = self.state, self.state.view, self.worker
        view.step, view.stepping, view.record = worker.step, stepping, worker.record
        view.in_flight_steps = [state.parts[i].launched_step for i in state.in_flight]
        view.ready = not state.parts[state.next_part].in_flight
        return view

    # -- events ----------------------------------------------------------------------------------

    @override
    def bucket_ready(self, bucket: int) -> bool:
        self.worker.wire.advance()
        return True

    @override
    def gradients_ready(self, optimizer: AttachedOptimizer, *, last: bool) -> bool:
        if self.strategy.gradient_norm:
            self._squared += self.worker.squared_norm(optimizer.gradients())
            if last:
                self.state.view.gradient_norm_squared = self._squared
                self.worker.norm_squared, self._squared = self._squared, 0.0
        if last and not self.votes_between_steps and self._due():
            self._pending = self.vote(0, stepping=True)
        return False

    def _due(self) -> bool:
        self._wanted = float(self.strategy.due(self._see(stepping=True)))
        return self._wanted > 0

    @override
    def step_ended(self) -> bool:
        state, shared = self.state, self.shared
        landings, self._pausing = state.view.landings, False
        self._record_staleness()
        if shared.eager:
            self._agree_inside_node()
        while state.in_flight and self._lands_now():
            self._land()
        self.worker.wire.advance()
        self.strategy.after_step(self._see(stepping=True))
        self._launch_queued(wait=False)
        synced = state.view.landings > landings
        self._vote_if_due()
        if self._pending is not None:
            acted = self.act(self._pending)
            if acted is not None:
                self._pending = None
                synced = synced or acted
                self._vote_if_due()  # the votes travel during the next step
        self._report()
        return synced

    def _vote_if_due(self) -> None:
        """Eager: start a round, unless one is in progress or has parts that were not launched.

        The second condition lets an automatic wire change its precision between two rounds.
        """
        state = self.state
        if self.shared.eager and self._pending is None and not state.queue and self._due():
            self._pending = self.vote(0, stepping=True)

    def _agree_inside_node(self) -> None:
        """All workers of a node must land the same parts and decide in the same step.

        What has arrived differs between them. They agree on the least, on the latest clock, and on
        the longest time that each launch and landing took.
        """
        state, view, team = self.state, self.state.view, self.worker.team
        spent, self._spent = self._spent, []
        if team.node is None:
            view.clock, view.spent = team.host.now(), spent
            return
        arrived = 0
        while arrived < len(state.in_flight):
            if not state.parts[state.in_flight[arrived]].arrived():
                break
            arrived += 1
        late = self._pending is None or not self._pending.done()
        view.clock, least, any_late, *view.spent = team.agree(
            team.host.now(), float(-arrived), float(late), *spent
        )
        self._arrived, self._tally_arrived = round(-least), not any_late

    def _lands_now(self) -> bool:
        """Whether the oldest part in flight lands at this step boundary."""
        part, lands = self.state.parts[self.state.in_flight[0]], self.shared.lands
        if isinstance(lands, int):
            return self.worker.step - part.launched_step >= lands
        if self._at_bound():
            return True
        return part.arrived() if self._arrived is None else self._arrived > 0

    def _at_bound(self) -> bool:
        return self.worker.step - self.state.fresh_step >= self.shared.bound

    # -- rounds ----------------------------------------------------------------------------------

    @override
    def vote(self, optimizer: int, *, stepping: bool, finishing: bool = False) -> Round:
        finite = self.look_for_non_finite(stepping=stepping)
        if self._report_non_finite:
            self._report_non_finite, finite = False, False
        weight = 0.0 if self.excluded else self.weight(stepping=stepping)
        numbers = self.strategy.vote(self._see(stepping=stepping))
        vote = self.rounds.vote(
            weight=weight,
            stepping=stepping,
            finishing=finishing,
            wanted=self._wanted if stepping else 0.0,
            finite=finite,
            numbers=numbers,
        )
        return self.rounds.send(vote)

    def weight(self, *, stepping: bool) -> float:
        """Weight of this worker in the mean of the coming round."""
        return float(stepping or self.unsynced)

    @override
    def finite(self, optimizer: int, *, stepping: bool) -> bool:
        """Look at the gradients, and at the model if steps were taken since the last look."""
        state, worker = self.state, self.worker
        alone, state.checked_step = worker.step - state.checked_step > 1, worker.step
        if not stepping:
            return worker.finite_model()
        if self.votes_between_steps:
            return self._finite_part(state.parts[state.next_part])
        if self.strategy.gradient_norm:
            finite = worker.scaled or math.isfinite(state.view.gradient_norm_squared)
        else:
            finite = worker.finite_gradients(worker.optimizers)
        return finite and (not alone or worker.finite_model())

    def _finite_part(self, part: Part) -> bool:
        (squared,) = self.worker.team.over_shards(part.squared_norm())
        return math.isfinite(squared)

    @override
    def restore(self) -> None:
        """x ← P, all of it: other parts may be non-finite, too."""
        if all(part.keeps_base for part in self.state.parts):
            for part in self.state.parts:
                part.restore(self.worker.step)
            self.worker.forget_non_finite()

    @override
    def can_decide(self, round: Round) -> bool:
        if not self.shared.eager:
            return True
        if not self._has_arrived(round) and not self._at_bound():
            return False
        round.wait()
        return True

    @override
    def decide(self, round: Round) -> bool:
        state, shared, view = self.state, self.shared, self.state.view
        chosen: Round | None = round
        if self.strategy.tally_delay:
            chosen, state.delayed = state.delayed, round
        view.rounds += 1
        if chosen is None:
            return False
        tally = tally_of(chosen, self._votes)
        launch = self.strategy.decide(self._see(stepping=round.own.stepping), tally)
        if not launch.parts:
            return False
        self._require_precision(launch.precision)
        count = len(state.parts)
        number = count if launch.parts == math.inf else int(launch.parts)
        view.rounds, view.launch_step, landings = 0, self.worker.step, view.landings
        state.queue += [
            QueuedLaunch((state.next_part + i) % count, round, launch.precision)
            for i in range(number)
        ]
        state.next_part = (state.next_part + number) % count
        if self.excluded and not shared.eager:
            self.restore()
        self._launch_queued(wait=not shared.eager or self._pausing)
        while state.in_flight and (shared.blocking or self._waits_at_bound()):
            self._land()
        return view.landings > landings

    def _has_arrived(self, round: Round) -> bool:
        """Whether the tally has arrived, on all workers of this node."""
        if self._arrived is None or self._pausing or self.worker.size == 1:
            return round.done()
        return self._tally_arrived and round is self._pending

    def _waits_at_bound(self) -> bool:
        return self.shared.eager and not self._pausing and self._at_bound()

    def _require_precision(self, precision: Precision | None) -> None:
        if precision is None and self.worker.wire.chosen:
            raise OffbeatError(
                f'wire="auto": decide() of {self.strategy} must return a precision with each launch'
            )

    # -- launching and landing -------------------------------------------------------------------

    def _launch_queued(self, *, wait: bool) -> None:
        """Launch what was decided, in order.

        Args:
            wait: Land a part that is still in flight from its last launch. Otherwise the queue
                waits for it.
        """
        state, view, worker = self.state, self.state.view, self.worker
        while state.queue:
            queued = state.queue[0]
            part = state.parts[queued.part]
            while part.in_flight:
                if not wait:
                    return
                self._land()
            view.launches += 1
            began = worker.team.host.now()
            sends = queued.round.own.weight
            if self.votes_between_steps and worker.guarded and not self._finite_part(part):
                # It became non-finite after the vote: send an update of 0.
                sends = 0.0
                self._found_late()
            outer_step = None
            if self.shared.error_feedback and self.shared.outer.momentum:
                outer_step = queued.round.then(partial(self._outer_step, queued))
            part.launch(
                queued.round.then(lambda sums: sums.weight),
                weight=sends,
                step=worker.step,
                what=f"launch {view.launches} (part {queued.part}) at step {worker.step}",
                precision=queued.precision,
                outer_step=outer_step,
            )
            if not self.shared.blocking:  # else the steps are lost if a peer dies before it lands
                part.synced_step = worker.step
            self._spend(began)
            state.in_flight.append(queued.part)
            state.queue.pop(0)

    def _found_late(self) -> None:
        """Non-finite values were found after the vote of this launch."""
        if self.worker.excludes:
            self.check.exclude_late(self.worker.step)
            self.restore()
        else:
            self._report_non_finite = True

    def _outer_step(self, queued: QueuedLaunch, sums: object) -> tuple[float, float]:
        tally = tally_of(queued.round, self._votes)
        view = self._see(stepping=self.state.view.stepping)
        return self.strategy.outer_step(view, queued.part, tally)

    def _land(self) -> None:
        """Land the part that was launched first. Waits for it."""
        state, view, worker = self.state, self.state.view, self.worker
        part = state.parts[state.in_flight[0]]
        if not self.shared.blocking:
            part.wait()
        began = worker.team.host.now()
        self.land(part)
        self._spend(began)
        state.in_flight.pop(0)
        view.landings += 1
        if self._arrived:
            self._arrived -= 1
        state.fresh_step = max(state.fresh_step, part.launched_step)
        if self.shared.blocking:
            part.synced_step = worker.step
        if len(state.parts) > 1:
            part.release()
        state.flight_seconds += (part.arrived_seconds or 0.0) - part.launched_seconds
        if self.shared.error_feedback:
            keep = 1 - 1 / (_SMOOTHED_PASSES * len(state.parts))
            sent, mean = worker.team.over_shards(part.sent_squared, part.mean_squared)
            view.sent_squared = keep * view.sent_squared + sent
            view.mean_squared = keep * view.mean_squared + mean

    def _spend(self, began: float) -> None:
        if self.shared.eager:
            self._spent.append(self.worker.team.host.now() - began)

    def land(self, part: Part) -> None:
        """Land one part, and with the last one the mean of the optimizers' state."""
        extra: list[Landing] = []
        if self.shared.optimizer_state and part is self.state.parts[-1]:
            own, total = part.weights()
            extra = self.worker.optimizer_state.launch(own, total) if total else []
        part.land(self.worker.moves, extra=extra)

    # -- end of data, consensus, checkpoints -----------------------------------------------------

    @override
    def pause(self, *, finishing: bool) -> None:
        self._pausing = True
        self._launch_queued(wait=True)

    @override
    def consensus(self, last: Round, *, final: bool) -> None:
        state, worker, weight = self.state, self.worker, last.wait().weight
        if final:
            self._launch_queued(wait=True)
            while state.in_flight:
                self._land()
            for part in state.parts:
                part.release()
            self._report()
        else:
            for index in state.in_flight:
                state.parts[index].show(worker.moves)
        if worker.size == 1:
            return
        if final and self.shared.error_feedback and self._lossy:
            self._average_residuals()
            return
        own, total = last.own.weight, weight
        if self.shared.error_feedback:  # every model differs from P by its quantization error
            own, total = 1.0, float(worker.size)
        what = f"{'final mean' if final else 'consensus'} at step {worker.step}"
        if not total:
            worker.exact_mean.average_integers(what=what)
        elif final:
            worker.exact_mean.average(own, total, what=what)
        else:
            worker.exact_mean.show(own, total, what=what)

    @property
    def _lossy(self) -> bool:
        wire = self.worker.wire
        return not wire.exact and wire.precision != "bfloat16"

    def _average_residuals(self) -> None:
        """x ← P + mean(x − P), of which the mean travels in int8.

        x − P is small against P, so the exact mean of whole models would gain nothing: an entry is
        off by at most a 254th of the largest residual in its block, and the rounding of the second
        stage.
        """
        worker, parts = self.worker, self.state.parts
        for index, part in enumerate(parts):
            part.launch(
                Completed(float(worker.size)),
                weight=1.0,
                step=worker.step,
                what=f"final mean (part {index})",
                precision="int8",
                outer_step=Completed((1.0, 0.0)),
            )
        for part in parts:  # all of them, before anything is written
            part.wait()
        for part in parts:
            part.land(worker.step)
            part.restore(worker.step)
        worker.exact_mean.average_buffers(1.0, worker.size, what="final mean of the buffers")

    @override
    def before_save(self, barrier: Callable[[], object]) -> None:
        """Let everything in flight arrive. Eager workers may be in different rounds: a barrier."""
        if self.shared.eager:
            barrier()
        self._launch_queued(wait=True)
        for part in self.state.parts:
            part.before_save()
        delayed = self.state.delayed
        self.state.saved_tally = [] if delayed is None else delayed.flat()

    @override
    def after_load(self) -> None:
        for part in self.state.parts:
            part.after_load()
        saved = self.state.saved_tally
        self.state.delayed = Round.saved(saved) if saved else None

    # -- telemetry -------------------------------------------------------------------------------

    def _record_staleness(self) -> None:
        """Count the local steps since the newest launch that has landed."""
        if not self.shared.blocking:
            state, past = self.state, self.worker.step - self.state.fresh_step
            state.staleness[past] = state.staleness.get(past, 0) + 1
            self.worker.record["staleness"] = past

    def _report(self) -> None:
        state, view, details = self.state, self.state.view, self.worker.details
        details.update(parts=len(state.parts), launches=view.launches, landings=view.landings)
        if not self.shared.blocking:
            details.update(
                landing_seconds=state.flight_seconds / max(1, view.landings),
                staleness_max=max(state.staleness, default=0),
                staleness_histogram=state.staleness,
            )

