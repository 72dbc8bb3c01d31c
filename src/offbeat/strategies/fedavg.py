"""FedAvg: rounds of local steps, after which the models of some workers are averaged."""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, Literal

import numpy as np
from typing_extensions import override

from offbeat.arguments import POSITIVE, require_number, setting
from offbeat.strategies.base import (
    NonFinite,
    Roll,
    Round,
    Strategy,
    Vote,
    Worker,
)

_PURPOSE = int.from_bytes(b"fedavg", "big")  # in (seed, purpose, round)
_FINEST = 10**6  # decimals are read as fractions with at most this denominator: 0.1 is 1/10


@dataclass
class FedAvgState:
    """Where the worker stands; ``rounds`` is the same on all workers."""

    rounds: int = 0
    last_step: int = 0  # own step at the end of the last round
    drawn: int = 0  # rounds in which this worker was drawn


@dataclass(frozen=True, kw_only=True, repr=False)
class FedAvg(Strategy):
    """Each worker trains by itself; a round ends with the mean of some workers' models.

    **Update**. D is the draw of the round: m of the N workers; w is a worker's number of samples,
    or 1; 0 for a worker that has no new step:

        x ← T(x, g)
        at the end of a round:  x̄ = Σ_{n∈D} w_n·x_n / Σ_{n∈D} w_n
                                x ← x̄ on the workers in D          unselected="keep"
                                x ← x̄ on all workers               unselected="restart"

    A round ends after every H = ``period`` steps; or, with E rounds in an epoch of S steps, after
    step t if ⌊t·E/S⌋ > ⌊(t−1)·E/S⌋, computed exactly: nothing is rounded to a period.

    m is C·N, rounded half up, and at least 1. D is drawn anew in each round by a generator seeded
    by (``seed``, this purpose, the round's number), so all workers know it without a message. If
    nobody in D has taken a step since it was last averaged, nothing happens.

    Args:
        period: H, steps in a round (≥ 1). Give this or ``rounds_per_epoch``.
        rounds_per_epoch: E, in (0, steps_per_epoch]; 0.25 is one round in four epochs. The SelSync
            paper's 1/E.
        steps_per_epoch: S, a worker's steps in an epoch (≥ 1); with ``rounds_per_epoch`` only.
            The same on all workers: with parts of different sizes, their mean, say.
        fraction: C in (0, 1], the part of the workers that is averaged in a round.
        unselected: "keep" lets the workers that were not drawn go on from their own model, as the
            SelSync paper does; "restart" gives every worker the mean, as McMahan et al. do, which
            discards what they did in this round.
        weights: One positive weight for each worker, in rank order and the same on all workers,
            such as its number of samples. None: all alike.
        seed: Seed of the draws (≥ 0).

    *Communication*: one mean of the model a round; blocking. Workers that were not drawn send
    zeros, so a round costs the same whatever ``fraction``: an all-reduce is cheaper than sending
    m models to one place and back. *Memory*: one flat copy of the model. *State*: the number of
    rounds, the own steps since the last.

    ``consensus`` and ``finish`` take the mean, weighted alike, of all models; where the last round
    left all workers equal (``fraction=1`` or "restart"), of those with steps since then. So a
    partial last round is not lost. With ``non_finite="leave_out"`` a worker gets the others' mean
    when it takes the next one; a round in which all that were drawn are left out changes nothing.

    *Differs from the papers*: workers that are not drawn compute, too. A worker need not see all
    of its data in a round. Floating-point buffers are averaged, integer ones take the maximum.

    Source: McMahan et al., "Communication-efficient learning of deep networks from decentralized
    data", AISTATS 2017, Algorithm 1; Tyagi & Swany, arXiv 2307.07950, §IV.
    """

    name: ClassVar[str] = "fedavg"
    adapts: ClassVar[bool] = True
    averages_state: ClassVar[bool] = True  # those who are not drawn keep theirs
    non_finite: ClassVar[tuple[NonFinite, ...]] = ("warn", "raise", "leave_out")
    period: int | None = setting(None, least=1)
    rounds_per_epoch: float | None = setting(None, least=1 / _FINEST)
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

    @property
    def continues(self) -> bool:  # type: ignore[override]
        """Whether any number of workers will do."""
        return self.weights is None

    @override
    def start(self, worker: Worker) -> FedAvgState:
        """Everyone holds the same model.

        Raises:
            ValueError: there are more or fewer weights than workers.
        """
        if self.weights is not None and len(self.weights) != worker.size:
            raise ValueError(
                f"weights must hold one number for each of the {worker.size} workers, "
                f"got {len(self.weights)}: {self.weights}"
            )
        return FedAvgState(last_step=worker.step)

    @override
    def kept(self, worker: Worker) -> dict[str, Any]:
        """The draws go on."""
        return {"rounds": worker.state.rounds}

    @override
    def take_up(self, worker: Worker, kept: dict[str, Any]) -> None:
        worker.state.rounds = kept["rounds"]

    def _steps_until(self, rounds: int) -> int:
        """Steps in the first so many rounds: ⌈rounds·S/E⌉, the least t with ⌊t·E/S⌋ = rounds."""
        if self.rounds_per_epoch is None:
            return rounds * (self.period or 1)
        rate = Fraction(self.rounds_per_epoch).limit_denominator(_FINEST)
        return math.ceil(rounds * (self.steps_per_epoch or 1) / rate)

    def _count(self, workers: int) -> int:
        """m, how many workers are drawn."""
        exact = Fraction(self.fraction).limit_denominator(_FINEST) * workers
        return max(1, math.floor(exact + Fraction(1, 2)))

    def _draws(self, worker: Worker) -> bool:
        """Whether this worker is drawn in the round under way."""
        count = self._count(worker.size)
        if count == worker.size:
            return True
        random = np.random.default_rng([self.seed, _PURPOSE, worker.state.rounds + 1])
        return worker.rank in random.permutation(worker.size)[:count]

    def _weight(self, worker: Worker) -> float:
        """w of this worker, relative to the mean of all: 1 where they are alike."""
        if self.weights is None:
            return 1.0
        return self.weights[worker.rank] * worker.size / math.fsum(self.weights)

    @override
    def due(self, worker: Worker) -> bool:
        state: FedAvgState = worker.state
        steps = self._steps_until(state.rounds + 1) - self._steps_until(state.rounds)
        return worker.step - state.last_step >= steps

    @override
    def vote(self, worker: Worker, part: int, *, stepping: bool, finishing: bool) -> Vote:
        """The weight is that of the drawn workers, the measure that of all in a consensus."""
        weight = self._weight(worker) if stepping or worker.has_news else 0.0
        counts = weight if self._leaves_all_equal(worker) else self._weight(worker)
        return Vote(
            weight=weight if self._draws(worker) else 0.0,
            measure=0.0 if worker.left_out else counts,
        )

    def _leaves_all_equal(self, worker: Worker) -> bool:
        """Whether all workers hold the same model after a round."""
        return self.unselected == "restart" or self._count(worker.size) == worker.size

    @override
    @staticmethod
    def nobody(roll: Roll) -> bool:
        """A round in which all that were drawn are left out changes nothing."""
        return roll.measure == 0

    @override
    def act(self, worker: Worker, round: Round) -> bool:
        """Average, and take the mean or not."""
        state: FedAvgState = worker.state
        drawn = self._draws(worker)
        worker.average(round.wait(), take=drawn or self.unselected == "restart")
        state.rounds += 1
        state.last_step = worker.step
        state.drawn += drawn
        worker.record["drawn"] = drawn
        worker.details.update(rounds=state.rounds, drawn=state.drawn)
        return True

    @override
    def consensus(self, worker: Worker, roll: Roll, *, final: bool) -> None:
        """The mean of all models; of those that have moved if the last round made all equal."""
        total = float(worker.size)
        if self._leaves_all_equal(worker) or (roll.not_finite and worker.leaves_out):
            total = roll.measure
        worker.average_all(roll.own.measure, total, final=final)
