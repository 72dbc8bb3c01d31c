"""The flow of strategies that average models: when a worker votes, decides, launches and lands.

``offbeat.strategies.base`` explains the terms.

The setting ``SharedModel.lands`` of a strategy determines the order of the calls in a local step:

    blocking (lands=0)              after k steps (lands=k)         on arrival (lands="arrived")
    gradients are ready             gradients are ready             gradients are ready
      due, vote                       due, vote
    optimizers step                 optimizers step                 optimizers step
                                      land parts of age k             wait, land arrived parts
      after_step                      after_step                      after_step
                                                                      launch queued parts
                                                                      due, vote
      decide                          decide                          decide
      launch and land                 launch                          launch
                                                                      due, vote

If ``due`` returns 0, the worker does not vote, and there is nothing to decide. The *staleness* of a
worker is the number of its local steps since the launch of the newest landed part.

With "arrived", a worker first waits, for ``WorkerView.wait_limit`` seconds at most, until all parts
in flight and the tally have arrived. A round is decided at the first step boundary after
its tally has arrived. ``due`` is not called before the previous round is decided and its parts are
launched. When the staleness reaches ``SharedModel.bound``, the worker waits for tallies and parts.
If neither is outstanding, it requests a round, even if ``due`` returns 0.

A worker that has reached a barrier still takes part in the rounds of the others. It votes with
``stepping=False``, and launches and lands the same parts in the same order. So all workers start
the same collectives in the same order.
"""

import math
from collections.abc import Callable
from typing import Any

from typing_extensions import override

from offbeat.averaging.carried_state import common_values, keep_local_values, load_common_values
from offbeat.averaging.flow import Flow
from offbeat.averaging.parts.flow_state import ModelFlowState
from offbeat.averaging.parts.make_parts import make_parts
from offbeat.averaging.parts.node_agreement import NodeAgreement
from offbeat.averaging.parts.part import Part
from offbeat.averaging.parts.pipeline import Pipeline
from offbeat.averaging.votes import Round
from offbeat.averaging.worker import AttachedOptimizer, Worker
from offbeat.strategies.base import SharedModel, Strategy, WorkerView


class ModelFlow(Flow):
    """Drives a strategy that averages models; see the module's docstring.

    ``shared`` gives the number of parts, the time of their landing, and the outer step. The
    pipeline launches and lands the parts.
    """

    state: ModelFlowState
    pipeline: Pipeline

    def __init__(self, strategy: Strategy, worker: Worker, shared: SharedModel) -> None:
        super().__init__(strategy, worker)
        self.shared = shared
        self.uses_gradients = strategy.gradient_norm
        self.waits = shared.blocking and shared.outer.plain
        self._calls_after_step = type(strategy).after_step is not Strategy.after_step
        self._wanted = 0.0  # last return value of ``Strategy.due``
        self._squared = 0.0  # ‖g‖² of this step's gradients so far
        self._pausing = False  # True from the start of a barrier to the end of the next step
        self._agreed = NodeAgreement()

    @override
    def start(self, common: dict[str, Any] | None = None) -> None:
        worker = self.worker
        view = worker.strategy_view()
        parts = self.make_parts()
        self.pipeline = Pipeline(worker, self.strategy, self.shared, parts, view)
        if common is not None:
            view.start_step = common["step"]
        view.state = self.strategy.state(view)
        if common is not None:
            load_common_values(view.state, common["state"])
        self.state = ModelFlowState(self.pipeline.state, view, checked_step=worker.step)

    def make_parts(self) -> list[Part]:
        """Return the parts of the shared model. A subclass may use another kind of part."""
        return make_parts(self.worker, self.shared)

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
        return self.pipeline.unsynced

    def _view(self, *, stepping: bool) -> WorkerView:
        """Return the strategy's view of this worker, up to date."""
        view, worker = self.state.view, self.worker
        view.step, view.stepping, view.record = worker.step, stepping, worker.record
        return view

    # -- events ----------------------------------------------------------------------------------

    @property
    @override
    def lr_factor(self) -> float:
        return self.state.view.lr_factor

    @override
    def gradients_ready(self, optimizer: AttachedOptimizer, *, last: bool) -> bool:
        """Measure ‖g‖² if the strategy reads it. Vote if due, unless ``lands="arrived"``."""
        if self.strategy.gradient_norm:
            self._squared += self.worker.squared_norm(optimizer.gradients())
            if last:
                self.state.view.gradient_norm_squared = self._squared
                self.worker.norm_squared, self._squared = self._squared, 0.0
        if last and not self.shared.eager and self._due():
            self._pending = self.vote(0, stepping=True)
        return False

    @override
    def step_skipped(self) -> None:
        self.pipeline.step_skipped()

    def _due(self) -> bool:
        self._wanted = float(self.strategy.due(self._view(stepping=True)))
        if self._waits_at_bound() and self.pipeline.oldest is None and self.worker.size > 1:
            self._wanted = max(1.0, self._wanted)  # only a launch can reduce the staleness
        return self._wanted > 0

    @override
    def step_ended(self) -> bool:
        """Land, decide and launch; see the module's docstring. Returns True if a part landed."""
        view, landings = self.state.view, self.state.view.landings
        self._pausing = False
        if not self.shared.blocking:  # with ``lands=0`` every launch has landed in ``decide``
            self.state.record_staleness(self.worker)
            if self.shared.eager:
                self._wait_for_parts()
                self._agreed.update(self.worker.team, self.pipeline, view, self._pending)
            while self._lands_now():
                self.land()
        if self._calls_after_step:
            self.strategy.after_step(self._view(stepping=True))
        if self.shared.eager:
            self.pipeline.launch_queued(wait=False)
        synced = view.landings > landings
        if self.shared.eager:
            self._vote_if_due()
        if self._pending is not None:
            acted = self.act(self._pending)
            if acted is not None:
                self._pending = None
                synced = synced or acted
                if self.shared.eager:
                    self._vote_if_due()  # the votes are in flight during the next step
        if self.pipeline.changed:
            self._report()
        return synced

    def _wait_for_parts(self) -> None:
        """Wait for all parts in flight and the tally, as long as the strategy allows."""
        view, worker, pipeline = self.state.view, self.worker, self.pipeline

        def busy() -> bool:
            if pipeline.arrived() < len(pipeline.state.in_flight):
                return True
            return self._pending is not None and not self._pending.done()

        view.waited, view.timed_out = 0.0, False
        if worker.size > 1 and view.wait_limit:
            what = f"parts at step {worker.step}"
            view.waited = worker.team.wait_while(busy, view.wait_limit, what)
            view.timed_out = busy()

    def _vote_if_due(self) -> None:
        """Start a round if the strategy requests one. Only with ``lands="arrived"``.

        No round starts while another one is in progress, or while a launch is queued.
        """
        if self._pending is None and not self.pipeline.state.queue and self._due():
            self._pending = self.vote(0, stepping=True)

    def _lands_now(self) -> bool:
        """Return True if the oldest part in flight lands at this step boundary."""
        part, lands = self.pipeline.oldest, self.shared.lands
        if part is None:
            return False
        if isinstance(lands, int):
            return self.worker.step - part.launched_step >= lands
        if self._at_bound():
            return True
        return part.arrived() if self._agreed.parts is None else self._agreed.parts > 0

    def _at_bound(self) -> bool:
        """Return True if the staleness has reached its bound."""
        return self.worker.step - self.state.view.fresh_step >= self.shared.bound

    def land(self, *, take: bool = True) -> None:
        """Wait for the oldest part in flight and land it; see ``Pipeline.land``."""
        self.pipeline.land(take=take)
        if self._agreed.parts:
            self._agreed.parts -= 1

    # -- rounds ----------------------------------------------------------------------------------

    @override
    def vote(self, optimizer: int, *, stepping: bool, finishing: bool = False) -> Round:
        finite = self.check_finite(stepping=stepping)
        if self.pipeline.report_non_finite:
            self.pipeline.report_non_finite, finite = False, False
        weight = self.weight(stepping=stepping)  # a subclass may set what the strategy votes
        numbers = self.strategy.vote(self._view(stepping=stepping))
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
        """Return this worker's weight in the mean of the coming round."""
        return float(stepping or self.unsynced)

    @override
    def is_finite(self, optimizer: int, *, stepping: bool) -> bool:
        """Return False if this worker's contribution is known to be non-finite.

        If the worker takes no step, this checks the model. Otherwise, with ``lands="arrived"``, it
        checks the part that is launched next, except with the policy "raise". With other ``lands``
        it checks the gradients, unless a GradScaler does, and the buffers. If the previous step was
        not checked, it also checks the parameters.
        """
        state, worker = self.state, self.worker
        unchecked, state.checked_step = worker.step - state.checked_step > 1, worker.step
        if not stepping:
            return worker.finite_model()
        if self.shared.eager:
            # With the policy "raise" the pipeline checks the part at its launch. For a non-finite
            # part it sends an update of 0, and the next vote reports it.
            return worker.guarded or self.pipeline.finite(self.pipeline.next_part)
        if self.strategy.gradient_norm:
            finite = worker.scaled or math.isfinite(state.view.gradient_norm_squared)
        else:
            finite = worker.finite_gradients(worker.optimizers)
        return finite and (worker.finite_model() if unchecked else worker.finite_buffers())

    @override
    def can_decide(self, round: Round) -> bool:
        """Return True if the round can be decided now: always, unless ``lands="arrived"``.

        With "arrived", the tally must have arrived. At the bound this method waits for it.
        """
        if not self.shared.eager:
            return True
        if not self._has_arrived(round) and not self._at_bound():
            return False
        round.wait()
        return True

    def _has_arrived(self, round: Round) -> bool:
        """Return True if the tally has arrived, and in a node on all workers of the node.

        At a barrier this needs no agreement, because every worker has waited for the tally.
        """
        if self._agreed.parts is None or self._pausing or self.worker.size == 1:
            return round.done()
        return self._agreed.tally and round is self._pending

    @override
    def decide(self, round: Round) -> bool:
        """Launch the parts that the strategy chooses. May also wait for parts and land them."""
        state, shared, view = self.state, self.shared, self.state.view
        chosen: Round | None = round
        if self.strategy.tally_delay:
            chosen, state.delayed = state.delayed, round
        view.rounds += 1
        if chosen is None:
            return False
        view = self._view(stepping=round.own.stepping)
        parts = self.strategy.decide(view, chosen.tally())
        if not parts:
            return False
        view.rounds, view.launch_step, landings = 0, self.worker.step, view.landings
        self.pipeline.add(parts, round)
        self.pipeline.launch_queued(wait=not shared.eager or self._pausing)
        while self.pipeline.oldest is not None and (shared.blocking or self._waits_at_bound()):
            self.land()
        return view.landings > landings

    def _waits_at_bound(self) -> bool:
        return self.shared.eager and not self._pausing and self._at_bound()

    # -- end of data, consensus, checkpoints -----------------------------------------------------

    @override
    def pause(self, *, finishing: bool) -> None:
        """Launch all queued parts. A part still in flight from an earlier launch lands first."""
        self._pausing = True
        self.pipeline.launch_queued(wait=True)

    @override
    def consensus(self, last: Round, *, final: bool) -> None:
        worker = self.worker
        if final:
            self.pipeline.settle()
            self._report()
        else:
            self.pipeline.show()
        if worker.size == 1:
            return
        what = f"{'final mean' if final else 'consensus'} at step {worker.step}"
        lossy = not worker.wire.exact and worker.wire.precision != "bfloat16"
        if final and lossy and self.shared.error_feedback:
            self.pipeline.average_residuals()
            worker.exact_mean.average_buffers(1.0, worker.size, what=what)
            return
        worker.exact_mean.consensus(*self.consensus_weights(last), final=final, what=what)

    def consensus_weights(self, last: Round) -> tuple[float, float]:
        """Return this worker's weight in a consensus, and the sum of all workers' weights."""
        if self.shared.error_feedback:
            # x − P may contain quantization errors even on a worker without new steps.
            return 1.0, float(self.worker.size)
        return last.own.weight, last.wait().weight

    @override
    def before_save(self, barrier: Callable[[], object]) -> None:
        if self.shared.eager:  # without a barrier the workers may be in different rounds
            barrier()
        self.pipeline.before_save()
        delayed = self.state.delayed
        self.state.saved_tally = [] if delayed is None else delayed.flat()

    @override
    def after_load(self) -> None:
        self.pipeline.after_load()
        saved = self.state.saved_tally
        self.state.delayed = Round.saved(saved) if saved else None

    def _report(self) -> None:
        self.pipeline.changed = False
        self.state.report(self.worker.details, waits=self.shared.blocking)
