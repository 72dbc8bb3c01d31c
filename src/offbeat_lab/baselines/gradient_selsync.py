"""SelSync that averages gradients in place of parameters (Tyagi & Swany, 2023, Figures 9 to 11)."""

import math
from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from offbeat import AttachError, SelSync
from offbeat.extend import (
    AttachedOptimizer,
    CustomFlow,
    Flow,
    GradientMean,
    Round,
    SummedVotes,
    Vote,
    WorkerView,
)


@dataclass
class GradientSelSyncState:
    """State of a ``GradientSelSyncFlow``: the view of its strategy."""

    view: WorkerView


class GradientSelSyncFlow(Flow):
    """Averages the gradients at the end of backward, if the strategy decides so.

    Raises AttachError if a step has several backward passes: the second one would add local
    gradients to a mean.
    """

    measures = True
    strategy: "GradientSelSync"
    state: GradientSelSyncState

    @override
    def start(self) -> None:
        if len(self.worker.optimizers) > 1:
            raise AttachError("GradientSelSync takes one optimizer: give it all parameters")
        view, (optimizer,) = self.worker.strategy_view(), self.worker.optimizers
        view.state = self.strategy.state(view)
        self.state = GradientSelSyncState(view)
        self._mean = GradientMean(self.worker.wire, optimizer.buckets)
        self._synced: bool | None = None  # result of this step's round; None before backward

    @property
    @override
    def unsynced(self) -> bool:
        return self.worker.touched or self.worker.step > 0

    @override
    def measure(self, optimizer: AttachedOptimizer) -> None:
        if self._synced is not None:
            raise AttachError(
                "GradientSelSync decides once per step: put all backward passes of a step but the "
                "last into `with sync.no_sync():`"
            )
        # Before the script clips the gradients, so the norm and the mean are of whole gradients.
        squared = self.worker.squared_norm(optimizer.gradients())
        self.state.view.gradient_norm_squared = squared
        self._synced = self.act(self.vote(0, stepping=True))

    @override
    def gradients_ready(self, optimizer: AttachedOptimizer, *, last: bool) -> bool:
        synced, self._synced = bool(self._synced), None
        return synced

    @override
    def step_skipped(self) -> None:
        self._synced = None

    @override
    def step_ended(self) -> bool:
        return False

    @override
    def vote(self, optimizer: int, *, stepping: bool) -> Round:
        view = self.state.view
        view.step, view.stepping, view.record = self.worker.step, stepping, self.worker.record
        vote = Vote(
            weight=float(stepping or self.unsynced),
            stepping=stepping,
            finite=self.check_finite(stepping=stepping),
            numbers=self.strategy.vote(view),
        )
        return self.rounds.send(vote)

    @override
    def is_finite(self, optimizer: int, *, stepping: bool) -> bool:
        return not stepping or math.isfinite(self.state.view.gradient_norm_squared)

    @override
    def decide(self, round: Round) -> bool:
        sums, stepping = round.wait(), bool(round.own.stepping)
        votes = SummedVotes(lambda: (int(sums.stepping), sums.numbers))
        if not self.strategy.decide(self.state.view, votes):
            return False
        self._mean.reduce([], contribute=stepping)
        return True

    @override
    def consensus(self, last: Round, *, final: bool) -> None:
        worker, what = self.worker, f"mean at step {self.worker.step}"
        worker.model_mean.consensus(last.own.weight, last.wait().weight, final=final, what=what)


@dataclass(frozen=True, kw_only=True, repr=False)
class GradientSelSync(SelSync):
    """SelSync with means of gradients: if any worker sets a flag, g ← mean(g);  then x ← T(x, g).

    Nothing makes the workers' models equal.
    """

    name: ClassVar[str] = "selsync_gradients"

    @override
    def averages(self) -> CustomFlow:  # type: ignore[override]
        return CustomFlow(GradientSelSyncFlow, blocking=True)
