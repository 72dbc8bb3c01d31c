"""Bulk synchronous parallel: every step uses the mean gradient of all workers."""

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from offbeat.strategies.base import Roll, Strategy, Worker, transient
from offbeat.strategies.gradient_mean import GradientMean


@dataclass
class BSPState:
    """Nothing to checkpoint: between two steps all workers are equal."""

    means: list[GradientMean] = transient()  # one an optimizer
    order: list[int] = transient()  # optimizers as they stepped last
    stepped: list[int] = transient(default_factory=list)  # optimizers that stepped just now


@dataclass(frozen=True, kw_only=True, repr=False)
class BSP(Strategy):
    """Average the gradients of all workers in every step, like DistributedDataParallel.

    **Update**:

        g ← mean(g)
        x ← T(x, g)

    *Communication*: one all-reduce of the gradients a step, in buckets that leave while backward
    still runs (with one optimizer). Accumulated, clipped or unscaled gradients are noticed and
    sent again; after three such steps in a row the overlap is given up. *Memory*: one copy of the
    gradients. *State*: none.
    """

    name: ClassVar[str] = "bsp"
    needs_unscaled: ClassVar[bool] = False

    @property
    def averages_state(self) -> bool:
        """It is the same on all workers anyway."""
        return True

    def start(self, worker: Worker) -> BSPState:
        """Hook the gradients."""
        # With several optimizers one backward may fill the gradients of another's parameters,
        # and the order in which buckets leave would depend on autograd: no overlap then.
        overlap = len(worker.parts) == 1 and worker.size > 1 and worker.fabric.overlaps_backward
        means = [
            GradientMean(
                worker.fabric,
                part.parameters,
                wire=worker.wire,
                name=f"gradients of optimizer {i}, bucket",
                slots=Roll.SLOTS,
                overlap=overlap,
            )
            for i, part in enumerate(worker.parts)
        ]
        return BSPState(means, order=list(range(len(worker.parts))))

    def before_step(self, worker: Worker) -> None:
        """g ← mean(g)."""
        self._round(worker, worker.part, stepping=True, finishing=False)
        worker.state.stepped.append(worker.part)

    def after_step(self, worker: Worker) -> bool:
        """Every iteration synchronizes."""
        state: BSPState = worker.state
        state.order, state.stepped = list(dict.fromkeys(state.stepped)), []
        return True

    def answer(self, worker: Worker, *, finishing: bool) -> Roll:
        """Send zeros for every optimizer; whoever fell behind gets the others' model at the end."""
        for part in worker.state.order:
            roll = self._round(worker, part, stepping=False, finishing=finishing)
            if roll.stepping == 0:
                break
        if roll.stepping == 0 and 0 < roll.weight < worker.size:
            worker.average(roll, what="catching up")
            worker.has_news = True
            roll = dataclasses.replace(roll, weight=worker.size, own_weight=1.0)
        return roll

    def _round(self, worker: Worker, part: int, *, stepping: bool, finishing: bool) -> Roll:
        values = worker.roll_values(stepping=stepping, finishing=finishing)
        sums = values
        if worker.size > 1:
            sums = worker.state.means[part].reduce(values, contribute=stepping)
        roll = Roll.read(sums, values[0])
        if roll.stepping:
            worker.has_news = stepping  # who took part in the last step has the newest model
        return roll

    def consensus(self, worker: Worker, roll: Roll) -> None:
        """The parameters are equal; the statistics in the buffers become their mean."""
        worker.average(roll, buffers_only=True, what="consensus")

    def stop(self, worker: Worker) -> None:
        """Unhook the gradients."""
        for mean in worker.state.means:
            mean.close()
