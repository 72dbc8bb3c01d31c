"""DES-LOC: local Adam that averages parameters, first and second moments with different periods.

In a round all workers average at least one of these three.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch.optim import Optimizer
from typing_extensions import override

from offbeat.averaging.model_flow import ModelFlow
from offbeat.averaging.parts.landing import land
from offbeat.averaging.votes import Round
from offbeat.averaging.worker import AttachedOptimizer, Worker
from offbeat.errors import AttachError
from offbeat.strategies.base import (
    CustomFlow,
    SharedModel,
    Strategy,
    Tally,
    WorkerView,
    setting,
)

FIRST, SECOND = "exp_avg", "exp_avg_sq"
"""Names of the moments u and v in the state of Adam and its variants in torch."""


@dataclass
class DesLocState:
    """State of one worker.

    Attributes:
        scheduled_step: Step of the last round in the schedule, which is equal on all workers.
        local_step: Local step of this worker at that round. Smaller than ``scheduled_step`` on a
            worker that has waited at a barrier.
    """

    scheduled_step: int = 0
    local_step: int = 0


class DesLocFlow(ModelFlow):
    """Averages the parameters as local SGD does, and the moments in rounds of their own."""

    can_exclude = False
    strategy: "DesLoc"

    @override
    def start(self, common: dict[str, Any] | None = None) -> None:
        self._checked: set[int] = set()  # indices of optimizers that hold both moments
        super().start(common)

    @override
    def optimizer_stepped(self, optimizer: AttachedOptimizer) -> None:
        """Check after the first step, which creates the optimizer's state, for both moments."""
        if optimizer.index in self._checked:
            return
        self._checked.add(optimizer.index)
        for state in optimizer.optimizer.state.values():
            if not {FIRST, SECOND} <= state.keys():
                raise _lacks_moments(optimizer.optimizer)

    @override
    def decide(self, round: Round) -> bool:
        """Average the parameters, then the moments, as far as they are due."""
        super().decide(round)
        worker, total = self.worker, round.wait().weight
        due = self.strategy.moments_due(self.state.view.state.scheduled_step)
        if due and total:
            sums = worker.optimizer_state.launch(round.own.weight, total, due)
            land(sums, worker.team.host)
        return True


def _lacks_moments(optimizer: Optimizer) -> AttachError:
    return AttachError(
        f"desloc averages both moments of Adam, {FIRST!r} and {SECOND!r}, and the state of this "
        f"{type(optimizer).__name__} lacks them: use Adam or AdamW, or the strategy local"
    )


def _flow_of(strategy: "DesLoc", worker: Worker) -> DesLocFlow:
    return DesLocFlow(strategy, worker, SharedModel())


@dataclass(frozen=True, kw_only=True, repr=False)
class DesLoc(Strategy):
    """Local Adam whose parameters and moments are averaged with a period each.

    **Update** at local step t = 1, 2, … of a worker with the parameters x and the moments u (first)
    and v (second). The gradient is g, and the inner optimizer is Adam or a variant:

        u ← β₁·u + (1 − β₁)·g;  v ← β₂·v + (1 − β₂)·g²;  x ← x − η·û/(√v̂ + ε)
        if t mod K_x = 0:  x ← mean(x)
        if t mod K_u = 0:  u ← mean(u)
        if t mod K_v = 0:  v ← mean(v)

    The mean is over all workers. A worker without steps since the last mean of x has weight 0. The
    counters of the bias correction û, v̂ are not averaged. With three equal periods this is local
    Adam, the same as ``LocalSGD(period=…, optimizer_state="average")``.

    Args:
        period: K_x, steps between two means of the parameters (≥ 1).
        first_period: K_u, steps between two means of the first moments (≥ 1). None: 3·K_x.
        second_period: K_v, steps between two means of the second moments (≥ 1). None: 6·K_x.

    *Communication*: M·(1/K_x + 1/K_u + 1/K_v) bytes per step for a model of M bytes, and 56 bytes
    for the vote of each round. A round with moments sends 16 more bytes, which compare the lists of
    their tensors. The workers wait for each mean. *Memory*: one flat copy of the model, and during
    a round one of each moment that is averaged. *State*: the steps until the next round.

    **Stability.** Choose ``second_period`` ≤ ``first_period`` if some gradients are exactly 0 on
    some workers, as with ReLU or rare tokens. If u is averaged before v, such an element has u from
    the other workers, but still v = 0, and its step is η·û/ε. On the recipe ``digits`` the largest
    |u|/√v rises from 7 to 2·10⁵ at the first mean of u with the default periods, and the run fails.
    A mean of v before or in the same round prevents this.

    *Differs from the paper*: clipping is left to the training loop. At the end of training only the
    parameters are averaged once more. If an optimizer also updates other state, such as the maximum
    of AMSGrad, this state stays local.

    Source: Iacob et al., "DES-LOC: Desynced low communication adaptive optimizers for training
    foundation models", arXiv 2505.22549.
    """

    name: ClassVar[str] = "desloc"
    period: int = setting(least=1)
    first_period: int | None = setting(None, least=1)
    second_period: int | None = setting(None, least=1)

    @override
    def averages(self) -> CustomFlow:
        return CustomFlow(_flow_of, self._check_run, blocking=True)

    def _check_run(self, workers: int, optimizers: Sequence[Optimizer]) -> None:
        """Raise unless these workers can train with the strategy; see ``CustomFlow``."""
        for optimizer in optimizers:
            if "betas" not in optimizer.defaults:
                raise _lacks_moments(optimizer)

    @override
    def state(self, worker: WorkerView) -> DesLocState:
        return DesLocState(local_step=worker.step)

    @override
    def due(self, worker: WorkerView) -> float:
        state: DesLocState = worker.state
        steps = self._next_step(state.scheduled_step) - state.scheduled_step
        return float(worker.step - state.local_step >= steps)

    @override
    def decide(self, worker: WorkerView, tally: Tally) -> float:
        """Advance the schedule by one round. Launch the parameters if they are due in it."""
        state: DesLocState = worker.state
        state.scheduled_step = self._next_step(state.scheduled_step)
        state.local_step = worker.step
        return 0 if state.scheduled_step % self.period else math.inf

    def moments_due(self, step: int) -> list[str]:
        """Return the names of the moments that are averaged at a step of the schedule."""
        periods = {FIRST: self._first_period, SECOND: self._second_period}
        return [name for name, period in periods.items() if step % period == 0]

    def _next_step(self, step: int) -> int:
        """Return the first step after ``step`` with a round."""
        periods = (self.period, self._first_period, self._second_period)
        return min((step // period + 1) * period for period in periods)

    @property
    def _first_period(self) -> int:
        return self.first_period or 3 * self.period

    @property
    def _second_period(self) -> int:
        return self.second_period or 6 * self.period
