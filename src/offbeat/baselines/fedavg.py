"""FedAvg, federated averaging: local steps, then the mean of the models of some workers."""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, Literal

import numpy as np
from typing_extensions import override

from offbeat.arguments import POSITIVE, require_number
from offbeat.averaging.model_flow import ModelFlow
from offbeat.averaging.votes import Round
from offbeat.checkpoint.state import transient
from offbeat.strategies.base import CustomFlow, SharedModel, Strategy, WorkerView, setting

_PURPOSE = int.from_bytes(b"fedavg", "big")  # the seed of a draw is (seed, purpose, round)
_LARGEST_DENOMINATOR = 10**6  # decimals are used as fractions: 0.1 is exactly 1/10


@dataclass
class FedAvgState:
    """State of one worker.

    Attributes:
        drawn: Number of rounds in which this worker was drawn.
        consensus_weight: Weight of this worker in a consensus after the coming vote.
    """

    drawn: int = 0
    consensus_weight: float = transient(default=0.0)


class FedAvgFlow(ModelFlow):
    """Averages the models of the drawn workers."""

    can_exclude = False
    strategy: "FedAvg"

    @override
    def start(self, common: dict[str, Any] | None = None) -> None:
        weights = self.strategy.weights
        if weights is not None and len(weights) != self.worker.size:
            raise ValueError(
                f"weights must hold one number for each of the {self.worker.size} workers, "
                f"got {len(weights)}: {weights}"
            )
        super().start(common)

    def _draws(self, round: int) -> bool:
        """Return True if this worker is drawn in a round, counted from 1."""
        return self.strategy.draws(self.worker.rank, self.worker.size, round)

    @override
    def weight(self, *, stepping: bool) -> float:
        weight = self.strategy.relative_weight(self.worker.rank, self.worker.size)
        sent = weight if stepping or self.unsynced else 0.0
        state: FedAvgState = self.state.view.state
        # A consensus averages all workers. If the last round has left all models equal, a worker
        # without a step since then has weight 0.
        all_equal = self.strategy.leaves_all_equal(self.worker.size)
        state.consensus_weight = sent if all_equal else weight
        return sent if self._draws(self.state.view.launches + 1) else 0.0

    @override
    def is_finite(self, optimizer: int, *, stepping: bool) -> bool:
        # A worker that steps and is not drawn contributes nothing.
        sends = not stepping or self._draws(self.state.view.launches + 1)
        return not sends or super().is_finite(optimizer, stepping=stepping)

    @override
    def land(self, *, take: bool = True) -> None:
        worker, view = self.worker, self.state.view
        drawn = self._draws(view.launches)
        super().land(take=drawn or self.strategy.unselected == "restart")
        view.state.drawn += drawn
        worker.record["drawn"] = drawn
        worker.details["drawn"] = view.state.drawn

    @override
    def consensus_weights(self, last: Round) -> tuple[float, float]:
        return last.own.numbers[0], last.wait().numbers[0]


@dataclass(frozen=True, kw_only=True, repr=False)
class FedAvg(Strategy):
    """Each worker trains locally. A round ends with the mean of the models of some workers.

    **Update**. D is the set of workers drawn in the round, m of the N workers. w is a worker's
    number of samples, or 1. It is 0 for a worker without a new step:

        x ← T(x, g)
        at the end of a round:  x̄ = Σ_{n∈D} w_n·x_n / Σ_{n∈D} w_n
                                x ← x̄ on the workers in D          unselected="keep"
                                x ← x̄ on all workers               unselected="restart"

    A round ends after every H = ``period`` steps. With E rounds in an epoch of S steps it ends
    after step t if ⌊t·E/S⌋ > ⌊(t−1)·E/S⌋. This is computed exactly, without rounding to a period.

    m is C·N, rounded half up, and at least 1. A generator seeded with (``seed``, this purpose,
    number of the round) draws D, so all workers know it without a message. If no worker in D has
    taken a step since it was last averaged, the round changes nothing.

    Args:
        period: H, steps in a round (≥ 1). Excludes ``rounds_per_epoch``.
        rounds_per_epoch: E in (0, steps_per_epoch]. 0.25 is one round in four epochs. It is 1/E in
            the notation of the SelSync paper.
        steps_per_epoch: S, steps of a worker in an epoch (≥ 1), the same on all workers. Required
            with ``rounds_per_epoch``. If workers have different numbers of samples, use a mean.
        fraction: C in (0, 1], the share of the workers that is averaged in a round.
        unselected: Model of the workers that were not drawn. "keep": they keep their local model,
            as in the SelSync paper. "restart": they take the mean and lose the steps of the round,
            as in McMahan et al.
        weights: One positive weight for each worker, such as its number of samples, in the order of
            the ranks and the same on all workers. None: equal weights.
        seed: Seed of the draws (≥ 0).

    *Communication*: one mean of the model a round; blocking. Workers that were not drawn send
    zeros, so a round costs the same for any ``fraction``. An all-reduce is cheaper than sending m
    models to one worker and back. *Memory*: one flat copy of the model. *State*: the number of
    rounds, and the steps since the last round.

    ``consensus`` and ``finish`` take the mean of all models with the same weights. If the last
    round has left all models equal (``fraction=1`` or "restart"), only workers with steps since
    then are averaged. So the steps of a partial last round are not lost.

    *Differs from the papers*: workers that are not drawn compute, too. A worker need not see all
    of its data in a round. Floating-point buffers are averaged. Of integer buffers the maximum is
    taken, in a consensus and at the end.

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
        return CustomFlow(lambda strategy, worker: FedAvgFlow(strategy, worker, SharedModel()))

    @override
    def state(self, worker: WorkerView) -> FedAvgState:
        return FedAvgState()

    @override
    def due(self, worker: WorkerView) -> float:
        steps = self._steps_until(worker.launches + 1) - self._steps_until(worker.launches)
        return float(worker.since_launch >= steps)

    @override
    def vote(self, worker: WorkerView) -> tuple[float, ...]:
        return (worker.state.consensus_weight,)

    def _steps_until(self, rounds: int) -> int:
        """Return the steps in the first rounds: ⌈rounds·S/E⌉, the least t with ⌊t·E/S⌋ = rounds."""
        if self.rounds_per_epoch is None:
            return rounds * (self.period or 1)
        rate = Fraction(self.rounds_per_epoch).limit_denominator(_LARGEST_DENOMINATOR)
        return math.ceil(rounds * (self.steps_per_epoch or 1) / rate)

    def _count(self, workers: int) -> int:
        """Return m, the number of drawn workers."""
        exact = Fraction(self.fraction).limit_denominator(_LARGEST_DENOMINATOR) * workers
        return max(1, math.floor(exact + Fraction(1, 2)))

    def draws(self, rank: int, workers: int, round: int) -> bool:
        """Return True if a worker is drawn in a round, counted from 1."""
        count = self._count(workers)
        if count == workers:
            return True
        random = np.random.default_rng([self.seed, _PURPOSE, round])
        return bool(rank in random.permutation(workers)[:count])

    def leaves_all_equal(self, workers: int) -> bool:
        """Return True if all workers hold the same model after a round."""
        return self.unselected == "restart" or self._count(workers) == workers

    def relative_weight(self, rank: int, workers: int) -> float:
        """Return w of a worker divided by the mean w of all workers."""
        if self.weights is None:
            return 1.0
        return self.weights[rank] * workers / math.fsum(self.weights)
