"""FedAvg, federated averaging: local steps, then the mean of the models of some workers.

A *round* is a number of steps that ends with such a mean. A random *draw* selects the workers whose
models are averaged. A consensus is not a round. At the end of a round and before a consensus each
worker sends a *vote*, a few numbers that include its weight.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, Literal

import numpy as np
from torch import Tensor
from typing_extensions import override

from offbeat import Strategy
from offbeat.extend import (
    POSITIVE,
    CustomFlow,
    GlobalModel,
    Round,
    RoundAverager,
    WorkerView,
    require_number,
    setting,
    transient,
)

_PURPOSE = int.from_bytes(b"fedavg", "big")  # part of the seed of each draw
_LARGEST_DENOMINATOR = 10**6  # settings are converted to fractions: 0.1 is exactly 1/10


@dataclass
class FedAvgState:
    """State of one worker.

    Attributes:
        drawn: Number of rounds in which this worker was drawn.
        consensus_weight: Weight of this worker if a consensus follows. Each vote contains it.
    """

    drawn: int = 0
    consensus_weight: float = transient(default=0.0)


class FedAvgFlow(RoundAverager):
    """Averages the models of the drawn workers.

    ``state.view.launches`` is the number of rounds so far.
    """

    strategy: "FedAvg"

    def _draws(self, round: int) -> bool:
        """Return True if this worker is drawn in a round, counted from 1."""
        return self.strategy.draws(self.worker.rank, self.worker.size, round)

    @override
    def weight(self, *, stepping: bool) -> float:
        """Return this worker's weight in the coming mean, and store ``consensus_weight``."""
        weight = self.strategy.relative_weight(self.worker.rank, self.worker.size)
        sent = weight if stepping or self.unsynced else 0.0
        state: FedAvgState = self.state.view.state
        # If each round makes all models equal, a worker without a step since the last round has
        # nothing new to contribute, so its weight is 0. A consensus does not depend on the draw.
        all_equal = self.strategy.leaves_all_equal(self.worker.size)
        state.consensus_weight = sent if all_equal else weight
        return sent if self._draws(self.state.view.launches + 1) else 0.0

    @override
    def is_finite(self, optimizer: int, *, stepping: bool) -> bool:
        # A worker that is not drawn contributes nothing to the round.
        sends = not stepping or self._draws(self.state.view.launches + 1)
        return not sends or super().is_finite(optimizer, stepping=stepping)

    @override
    def land(self, flight: Any, *, take: bool = True) -> None:
        """Wait for the mean. x ← x̄ if this worker was drawn, or with ``unselected="restart"``."""
        worker, view = self.worker, self.state.view
        drawn = self._draws(view.launches)
        super().land(flight, take=take and (drawn or self.strategy.unselected == "restart"))
        view.state.drawn += drawn
        worker.record["drawn"] = drawn
        worker.details["drawn"] = view.state.drawn

    @override
    def consensus_weights(self, last: Round) -> tuple[float, float]:
        return last.own.numbers[0], last.wait().numbers[0]

    @override
    def snapshot(self) -> list[Tensor]:
        """Multiply the contribution by this worker's weight relative to the mean weight."""
        weight = self.strategy.relative_weight(self.worker.rank, self.worker.size)
        copies = super().snapshot()
        for tensor in copies:
            if tensor.is_floating_point() or tensor.is_complex():
                tensor.mul_(weight)
        return copies


@dataclass(frozen=True, kw_only=True, repr=False)
class FedAvg(Strategy):
    """Each worker trains locally. A round ends with the mean of the models of some workers.

    **Update**. x_n is the local model of worker n, T the step of its optimizer with the gradient g.
    D is the set of the workers drawn in the round, m of the N workers. w_n is the weight of worker
    n in the mean. It is 0 for a worker without steps since it last received a mean:

        x ← T(x, g)
        at the end of a round:  x̄ = Σ_{n∈D} w_n·x_n / Σ_{n∈D} w_n
                                x ← x̄ on the workers in D          unselected="keep"
                                x ← x̄ on all workers               unselected="restart"

    A round ends after every H = ``period`` steps. If E = ``rounds_per_epoch`` and S =
    ``steps_per_epoch`` are given instead, round r ends after step ⌈r·S/E⌉. For example, E = 2 and
    S = 5 give rounds that end after steps 3, 5, 8 and 10.

    m is C·N with C = ``fraction``, rounded half up, and at least 1. D is drawn at random, seeded
    with ``seed`` and the number of the round. So all workers know D without a message.

    Args:
        period: H, steps in a round (≥ 1). Give either ``period`` or ``rounds_per_epoch``.
        rounds_per_epoch: E, from 10⁻⁶ to ``steps_per_epoch``. For example, 0.25 is one round in
            four epochs. In the SelSync paper E is the inverse, the number of epochs in a round.
        steps_per_epoch: S, steps of a worker in an epoch (≥ 1), equal on all workers. Required with
            ``rounds_per_epoch``.
        fraction: C in (0, 1], the fraction of the workers that is averaged in a round.
        unselected: Model of the workers that were not drawn. "keep": they keep their local model,
            as in the SelSync paper. "restart": they receive the mean and lose the steps of the
            round, as in McMahan et al.
        weights: One positive weight for each worker, such as its number of samples, in the order of
            the ranks and equal on all workers. None: equal weights.
        seed: Seed of the draws (≥ 0).

    *Communication*: one all-reduce of the model per round; blocking. Workers that were not drawn
    send zeros, so a round costs the same for any ``fraction``. *Memory*: one flat copy of the
    model. *State*: the number of rounds, and the steps since the last round.

    ``consensus`` and ``finish`` take the weighted mean of all models. If each round makes all
    models equal (m = N or "restart"), workers without steps since the last round have weight 0.

    *Differs from the papers*: workers that are not drawn also take steps. A worker need not see all
    of its data in a round. Floating-point buffers are averaged.

    Source: McMahan et al., "Communication-efficient learning of deep networks from decentralized
    data", AISTATS 2017, Algorithm 1; Tyagi & Swany, arXiv 2307.07950, §IV.
    """

    name: ClassVar[str] = "fedavg"
    period: int | None = setting(None, least=1)
    rounds_per_epoch: float | None = setting(None, least=1 / _LARGEST_DENOMINATOR)
    steps_per_epoch: int | None = setting(None, least=1)
    fraction: float = setting(1.0, above=0, most=1)
    unselected: Literal["keep", "restart"] = "keep"
    weights: tuple[float, ...] | None = None
    seed: int = setting(0, least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.period is None) == (self.rounds_per_epoch is None):
            raise ValueError(
                "give either period or rounds_per_epoch (with steps_per_epoch), got "
                f"period={self.period}, rounds_per_epoch={self.rounds_per_epoch}"
            )
        if (self.rounds_per_epoch is None) != (self.steps_per_epoch is None):
            raise ValueError(
                "rounds_per_epoch and steps_per_epoch go together, got "
                f"{self.rounds_per_epoch} and {self.steps_per_epoch}"
            )
        if (self.rounds_per_epoch or 0) > (self.steps_per_epoch or 0):
            raise ValueError(
                f"rounds_per_epoch must be at most steps_per_epoch={self.steps_per_epoch}, "
                f"got {self.rounds_per_epoch}"
            )
        if self.weights is not None:
            if not isinstance(self.weights, tuple):
                raise TypeError(
                    f"weights must be a tuple, one number for each worker, got {self.weights!r}"
                )
            for weight in self.weights:
                require_number("each of weights", weight, POSITIVE)

    @override
    def averages(self) -> CustomFlow:
        return CustomFlow(
            lambda strategy, worker: FedAvgFlow(strategy, worker, GlobalModel()),
            self._check_run,
            blocking=True,
        )

    def _check_run(self, workers: int) -> None:
        """Raise unless these workers can train with the strategy; see ``CustomFlow``."""
        if self.weights is not None and len(self.weights) != workers:
            raise ValueError(
                f"weights must hold one number for each of the {workers} workers, "
                f"got {len(self.weights)}: {self.weights}"
            )

    @override
    def state(self, worker: WorkerView) -> FedAvgState:
        return FedAvgState()

    @override
    def due(self, worker: WorkerView) -> bool:
        steps = self._steps_until(worker.launches + 1) - self._steps_until(worker.launches)
        return worker.since_launch >= steps

    @override
    def vote(self, worker: WorkerView) -> tuple[float, ...]:
        return (worker.state.consensus_weight,)

    def _steps_until(self, rounds: int) -> int:
        """Return the number of steps in the first ``rounds`` rounds, ⌈rounds·S/E⌉."""
        if self.rounds_per_epoch is None:
            return rounds * (self.period or 1)
        rate = Fraction(self.rounds_per_epoch).limit_denominator(_LARGEST_DENOMINATOR)
        return math.ceil(rounds * (self.steps_per_epoch or 1) / rate)

    def _count(self, workers: int) -> int:
        """Return m, the number of drawn workers."""
        exact = Fraction(self.fraction).limit_denominator(_LARGEST_DENOMINATOR) * workers
        return max(1, math.floor(exact + Fraction(1, 2)))

    def draws(self, rank: int, workers: int, round: int) -> bool:
        """Return True if the worker with this rank is drawn in a round, counted from 1."""
        count = self._count(workers)
        if count == workers:
            return True
        random = np.random.default_rng([self.seed, _PURPOSE, round])
        return bool(rank in random.permutation(workers)[:count])

    def leaves_all_equal(self, workers: int) -> bool:
        """Return True if every round makes the models of all workers equal."""
        return self.unselected == "restart" or self._count(workers) == workers

    def relative_weight(self, rank: int, workers: int) -> float:
        """Return the weight of a worker divided by the mean weight of all workers."""
        if self.weights is None:
            return 1.0
        return self.weights[rank] * workers / math.fsum(self.weights)
