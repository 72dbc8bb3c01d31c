"""Bulk synchronous parallel: every step uses the mean gradient of all workers."""

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from offbeat.fabric import Completed, Handle
from offbeat.means import GradientMean
from offbeat.strategies.base import (
    Averages,
    Ballot,
    NonFinite,
    Part,
    Roll,
    Round,
    Rounds,
    Strategy,
    Worker,
    transient,
)


@dataclass
class BSPState:
    """Nothing to checkpoint: between two steps all workers are equal."""

    means: list[GradientMean] = transient()  # one an optimizer


@dataclass(frozen=True, kw_only=True, repr=False)
class BSP(Strategy):
    """Average the gradients of all workers in every step, like DistributedDataParallel.

    **Update**:

        g ← mean(g)
        x ← T(x, g)

    *Communication*: one all-reduce of the gradients a step, in buckets that leave while backward
    still runs (with one optimizer). Accumulated, clipped or unscaled gradients are noticed and
    sent again; after three such steps in a row the overlap is given up. Sparse gradients travel
    dense, and their mean is sparse again. *Memory*: one copy of the gradients. *State*: none.
    """

    name: ClassVar[str] = "bsp"
    averages: ClassVar[Averages] = "gradients"
    adapts: ClassVar[bool] = True
    rounds: ClassVar[Rounds] = "gradients"
    needs_unscaled: ClassVar[bool] = False
    non_finite: ClassVar[tuple[NonFinite, ...]] = ("warn", "raise", "leave_out")
    averages_state: ClassVar[bool] = True  # it is the same on all workers anyway
    replicates: ClassVar[bool] = True
    continues: ClassVar[bool] = True

    @override
    def start(self, worker: Worker) -> BSPState:
        overlap = worker.overlaps_backward
        means = [
            GradientMean(
                worker.team,
                worker.wire,
                part.buckets,
                name=f"gradients of optimizer {part.index}, bucket",
                slots=worker.ballot_slots,
                overlap=overlap,
            )
            for part in worker.parts
        ]
        return BSPState(means)

    @override
    def bucket_ready(self, worker: Worker, part: Part, bucket: int) -> bool:
        mean: GradientMean = worker.state.means[part.index]
        mean.start(bucket)
        return mean.overlap

    @override
    def due(self, worker: Worker) -> bool:
        return True

    @override
    def call(self, worker: Worker, part: int, ballot: Ballot) -> Handle[Roll]:
        """g ← mean(g), and the ballot rides along: a message less in every step."""
        sums = ballot.values()
        if worker.size > 1:
            contribute = ballot.stepping and ballot.weight != 0  # 0: it is left out
            mean: GradientMean = worker.state.means[part]
            sums = mean.reduce(sums, contribute=contribute, take=ballot.stepping)
        return Completed(ballot.read(sums, worker.size))

    @override
    def act(self, worker: Worker, round: Round) -> bool:
        worker.has_news = round.wait().own.stepping  # who took part has the newest model
        return True

    @override
    def catch_up(self, worker: Worker, roll: Roll) -> None:
        """Who ran out of data before the others takes their model."""
        if 0 < roll.weight < worker.size:
            worker.average_all(roll.own.weight, roll.weight, final=True)
            worker.has_news = True

    @override
    def consensus(self, worker: Worker, roll: Roll, *, final: bool) -> None:
        """The parameters are equal; the statistics in the buffers become their mean."""
        worker.average_buffers(final=final)
