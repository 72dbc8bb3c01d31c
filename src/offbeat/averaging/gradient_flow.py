"""The flow of strategies that average gradients, at the end of backward.

If gradients are averaged in every step, there is nothing to decide. The votes then report, for
example, whether a worker takes a step and whether its gradients are finite.
``offbeat.strategies.base`` explains the terms.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor
from typing_extensions import override

from offbeat.averaging.flow import Flow
from offbeat.averaging.gradients import GradientMean
from offbeat.averaging.votes import Round, Vote, summed_votes
from offbeat.averaging.worker import AttachedOptimizer, Worker
from offbeat.strategies.base import Gradients, Strategy, WorkerView, transient
from offbeat.transport.future import Completed


@dataclass
class GradientFlowState:
    """State of a ``GradientFlow``.

    Attributes:
        views: Data that the strategy may read, one ``WorkerView`` for each optimizer.
        errors: Quantization errors of all ``means``.
        means: One ``GradientMean`` for each optimizer, which averages its gradients.
        newest: True if this worker has the newest model: it took a step in the last round, or has
            received the newest model since. Only used if every step averages.
        launch_steps: Local step of the newest mean of each optimizer, at first ``start_step``.
        start_step: Number of local steps when the present group of workers began to train.
    """

    views: list[WorkerView]
    errors: list[Tensor]
    means: list[GradientMean] = transient()
    newest: bool = False
    launch_steps: list[int] = field(default_factory=list)
    start_step: int = 0


class GradientFlow(Flow):
    """g ← mean(g), in every step or when the strategy decides so.

    Each optimizer has separate rounds. A worker votes when the gradients of the optimizer are
    complete and ``Strategy.due`` requests a round. At a barrier it votes in every round. If
    gradients are averaged in every step and there is one optimizer, the vote is sent with the
    gradients. Otherwise the workers exchange votes first. So they notice if they step different
    optimizers, and a worker at a barrier learns which optimizer the others step.
    """

    state: GradientFlowState

    def __init__(self, strategy: Strategy, worker: Worker, gradients: Gradients) -> None:
        super().__init__(strategy, worker)
        self.replicates = gradients.every_step
        self._wanted = 0.0  # last return value of ``Strategy.due``

    @override
    def start(self) -> None:
        worker, strategy = self.worker, self.strategy
        views = []
        for _ in worker.optimizers:
            view = worker.strategy_view()
            view.state = strategy.state(view)
            views.append(view)
        means = [self.make_mean(*each) for each in zip(worker.optimizers, views, strict=True)]
        errors, begun = [each for mean in means for each in mean.errors], worker.step
        self.state = GradientFlowState(
            views, errors, means, launch_steps=[begun] * len(views), start_step=begun
        )

    def make_mean(self, optimizer: AttachedOptimizer, view: WorkerView) -> GradientMean:
        """Return the object that averages the gradients of ``optimizer``.

        ``view`` is the strategy's view for this optimizer.
        """
        overlap = self.replicates and self.worker.overlaps_backward
        return GradientMean(self.worker.wire, optimizer.buckets, overlap=overlap)

    @property
    @override
    def unsynced(self) -> bool:
        if self.replicates:  # the parameters are not averaged, so other changes do not matter
            return self.state.newest
        return self.worker.touched or self.worker.step > self.state.start_step

    def _view(self, optimizer: int, *, stepping: bool) -> WorkerView:
        """Return the strategy's view of this worker, up to date."""
        view, worker = self.state.views[optimizer], self.worker
        view.step, view.stepping, view.record = worker.step, stepping, worker.record
        view.since_launch = worker.step - self.state.launch_steps[optimizer]
        return view

    # -- events ----------------------------------------------------------------------------------

    @override
    def backward_buckets(self, optimizer: AttachedOptimizer) -> Sequence[Sequence[Tensor]]:
        return optimizer.buckets if self.state.means[optimizer.index].overlap else []

    @override
    def bucket_ready(self, bucket: int) -> None:
        self.state.means[0].start(bucket)

    @override
    def gradients_ready(self, optimizer: AttachedOptimizer, *, last: bool) -> bool:
        """Vote, decide and average the gradients, if a round is due. Blocks."""
        view = self._view(optimizer.index, stepping=True)
        if self.strategy.gradient_norm:
            view.gradient_norm_squared = self.worker.squared_norm(optimizer.gradients())
        self._wanted = float(self.strategy.due(view))
        if not self._wanted:
            return False
        return self.act(self.vote(optimizer.index, stepping=True))

    @override
    def step_ended(self) -> bool:
        for index in range(len(self.state.views)):
            self.strategy.after_step(self._view(index, stepping=True))
        return False

    # -- rounds ----------------------------------------------------------------------------------

    @override
    def vote(self, optimizer: int, *, stepping: bool) -> Round:
        """Send the vote. If every step averages, also average the gradients. This blocks."""
        view = self._view(optimizer, stepping=stepping)
        vote = Vote(
            weight=float(stepping or self.unsynced),
            stepping=stepping,
            optimizer=optimizer,
            wanted=self._wanted if stepping else 0.0,
            finite=self.check_finite(stepping=stepping, optimizer=optimizer),
            numbers=self.strategy.vote(view),
        )
        means = self.state.means
        if not self.replicates or self.worker.size == 1:
            return self.rounds.send(vote)
        if len(means) > 1:
            round = self.rounds.send(vote)
            sums = round.wait()
            if sums.stepping:
                means[int(sums.optimizer)].reduce([], contribute=stepping)
            return round
        vote = self.rounds.number(vote)
        rows = means[0].reduce(vote.row(), contribute=stepping)
        return Round(vote, Completed(self.rounds.check(rows)))

    @override
    def is_finite(self, optimizer: int, *, stepping: bool) -> bool:
        return not stepping or self.worker.scaled or self._finite_gradients(optimizer)

    @override
    def decide(self, round: Round) -> bool:
        """Average the gradients if the strategy decides so, unless ``vote`` has averaged them."""
        state, stepping = self.state, bool(round.own.stepping)
        index = int(round.own.optimizer if stepping else round.wait().optimizer)
        if self.replicates:
            round.wait()
            state.newest = stepping
            state.views[index].launches += 1
            return True
        view = self._view(index, stepping=stepping)
        if not self.strategy.decide(view, summed_votes(round.sums)):
            return False
        if len(state.means) > 1:
            round.wait()  # raises if another worker steps another optimizer
        view.launches += 1
        state.launch_steps[index] = self.worker.step
        # Unless the policy is "warn", non-finite gradients are not sent: all would receive them.
        allowed = not self.worker.guarded or self._finite_gradients(index)
        state.means[index].reduce([], contribute=stepping and allowed)
        return True

    def _finite_gradients(self, index: int) -> bool:
        if self.strategy.gradient_norm:
            return math.isfinite(self.state.views[index].gradient_norm_squared)
        return self.worker.finite_gradients([self.worker.optimizers[index]])

    @override
    def all_paused(self, last: Round) -> None:
        # A worker that ran out of data before others receives the newest model.
        weight = last.wait().weight
        if self.replicates and 0 < weight < self.worker.size:
            what = f"mean of the newest models at step {self.worker.step}"
            self.worker.exact_mean.average(last.own.weight, weight, what=what)
            self.state.newest = True

    # -- consensus -------------------------------------------------------------------------------

    @override
    def consensus(self, last: Round, *, final: bool) -> None:
        worker, weight = self.worker, last.wait().weight
        if worker.size == 1:
            return
        what = f"{'final mean' if final else 'consensus'} at step {worker.step}"
        if self.replicates:  # the parameters are equal on all workers
            worker.exact_mean.average_buffers(1.0, worker.size, what=what)
        else:
            worker.exact_mean.consensus(last.own.weight, weight, final=final, what=what)
