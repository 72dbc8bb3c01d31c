"""The flow of strategies that average gradients, in every step at the end of backward.

There is nothing to decide. The votes report, for example, whether a worker takes a step and whether
its gradients are finite. ``offbeat.strategies.base`` explains the terms.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from offbeat.averaging.flow import Flow
from offbeat.averaging.gradients import GradientMean
from offbeat.averaging.votes import Round, Vote
from offbeat.averaging.worker import AttachedOptimizer
from offbeat.strategies.base import transient
from offbeat.transport.future import Completed


@dataclass
class GradientFlowState:
    """State of a ``GradientFlow``.

    Attributes:
        errors: Quantization errors of all ``means``.
        means: One ``GradientMean`` for each optimizer, which averages its gradients.
        newest: True if this worker has the newest model: it took a step in the last round, or has
            received the newest model since.
    """

    errors: list[Tensor]
    means: list[GradientMean] = transient()
    newest: bool = False


class GradientFlow(Flow):
    """g ← mean(g), in every step.

    Each optimizer has separate rounds. A worker votes when the gradients of the optimizer are
    complete. At a barrier it votes in every round. If there is one optimizer, the vote is sent with
    the gradients. Otherwise the workers exchange votes first. So they notice if they step different
    optimizers, and a worker at a barrier learns which optimizer the others step.
    """

    state: GradientFlowState
    replicates = True

    @override
    def start(self) -> None:
        means = [self.make_mean(optimizer) for optimizer in self.worker.optimizers]
        self.state = GradientFlowState([each for mean in means for each in mean.errors], means)

    def make_mean(self, optimizer: AttachedOptimizer) -> GradientMean:
        """Return the object that averages the gradients of ``optimizer``."""
        worker = self.worker
        return GradientMean(worker.wire, optimizer.buckets, overlap=worker.overlaps_backward)

    @property
    @override
    def unsynced(self) -> bool:
        return self.state.newest  # parameters are not averaged, so other changes do not matter

    # -- events ----------------------------------------------------------------------------------

    @override
    def backward_buckets(self, optimizer: AttachedOptimizer) -> Sequence[Sequence[Tensor]]:
        return optimizer.buckets if self.state.means[optimizer.index].overlap else []

    @override
    def bucket_ready(self, bucket: int) -> None:
        self.state.means[0].start(bucket)

    @override
    def gradients_ready(self, optimizer: AttachedOptimizer, *, last: bool) -> bool:
        """Vote, and average the gradients. Blocks."""
        return self.act(self.vote(optimizer.index, stepping=True))

    @override
    def step_ended(self) -> bool:
        return False

    # -- rounds ----------------------------------------------------------------------------------

    @override
    def vote(self, optimizer: int, *, stepping: bool) -> Round:
        """Send the vote, and average the gradients. Blocks."""
        vote = Vote(
            weight=float(stepping or self.unsynced),
            stepping=stepping,
            optimizer=optimizer,
            finite=self.check_finite(stepping=stepping, optimizer=optimizer),
        )
        means = self.state.means
        if self.worker.size == 1:
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
        return not stepping or self.worker.finite_gradients([self.worker.optimizers[optimizer]])

    @override
    def decide(self, round: Round) -> bool:
        """Wait for the votes. ``vote`` has averaged the gradients."""
        round.wait()
        self.state.newest = bool(round.own.stepping)
        return True

    @override
    def leave_barrier(self, last: Round) -> None:
        # A worker that ran out of data before others receives the newest model.
        weight = last.wait().weight
        if 0 < weight < self.worker.size:
            what = f"mean of the newest models at step {self.worker.step}"
            self.worker.model_mean.average(last.own.weight, weight, what=what)
            self.state.newest = True

    @override
    def consensus(self, last: Round, *, final: bool) -> None:
        worker = self.worker
        if worker.size > 1:  # the parameters are equal on all workers
            what = f"{'final mean' if final else 'consensus'} at step {worker.step}"
            worker.model_mean.average_buffers(1.0, worker.size, what=what)
