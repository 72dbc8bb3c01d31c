"""FedAvg: rounds of local steps, after which the models of some workers are averaged."""

import dataclasses
import math
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Literal

import numpy as np

from offbeat.fabric import Handle
from offbeat.strategies.base import (
    Roll,
    Strategy,
    Worker,
    require_integer,
    require_number,
    transient,
)

_PURPOSE = int.from_bytes(b"fedavg", "big")  # in (seed, purpose, round)
_FINEST = 10**6  # decimals are read as fractions with at most this denominator: 0.1 is 1/10


@dataclass
class FedAvgState:
    """Where the worker stands; ``rounds`` is the same on all workers."""

    rounds: int = 0
    steps_in_round: int = 0  # own steps since the last round
    drawn: int = 0  # rounds in which this worker was drawn
    roll: Handle[Roll] | None = transient(default=None)  # called before this step


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
    partial last round is not lost.

    *Differs from the papers*: workers that are not drawn compute, too. A worker need not see all
    of its data in a round. Floating-point buffers are averaged, integer ones take the maximum.

    Source: McMahan et al., "Communication-efficient learning of deep networks from decentralized
    data", AISTATS 2017, Algorithm 1; Tyagi & Swany, arXiv 2307.07950, §IV.
    """

    name: ClassVar[str] = "fedavg"
    period: int | None = None
    rounds_per_epoch: float | None = None
    steps_per_epoch: int | None = None
    fraction: float = 1.0
    unselected: Literal["keep", "restart"] = "keep"
    weights: tuple[float, ...] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
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
        if self.period is not None:
            require_integer("period", self.period, least=1)
        if self.rounds_per_epoch is not None:
            require_integer("steps_per_epoch", self.steps_per_epoch, least=1)
            require_number("rounds_per_epoch", self.rounds_per_epoch)
            if not 1 / _FINEST <= self.rounds_per_epoch <= (self.steps_per_epoch or 0):
                raise ValueError(
                    "rounds_per_epoch must be positive and at most steps_per_epoch="
                    f"{self.steps_per_epoch}, got {self.rounds_per_epoch}"
                )
        require_number("fraction", self.fraction)
        if not 0 < self.fraction <= 1:
            raise ValueError(f"fraction must be above 0 and at most 1, got {self.fraction}")
        if self.unselected not in ("keep", "restart"):
            raise ValueError(f'unselected must be "keep" or "restart", got {self.unselected!r}')
        require_integer("seed", self.seed, least=0)
        if self.weights is not None:
            if not isinstance(self.weights, tuple):
                raise TypeError(
                    f"weights must be a tuple, one number for each worker, got {self.weights!r}"
                )
            for weight in self.weights:
                require_number("each of weights", weight)
                if not 0 < weight < math.inf:
                    raise ValueError(f"each of weights must be positive and finite, got {weight}")

    @property
    def averages_state(self) -> bool:
        """At every mean; those who are not drawn keep theirs."""
        return True

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
        worker.keep_reference()
        return FedAvgState()

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

    def before_step(self, worker: Worker) -> None:
        """Call the roll while the optimizer steps, if this step ends a round."""
        state: FedAvgState = worker.state
        steps = self._steps_until(state.rounds + 1) - self._steps_until(state.rounds)
        if worker.completes_iteration and state.steps_in_round + 1 >= steps:
            state.roll = self._call(worker, stepping=True)

    def _call(self, worker: Worker, *, stepping: bool, finishing: bool = False) -> Handle[Roll]:
        """Start a roll: its weight is that of the drawn workers, its measure that of all."""
        weight = self._weight(worker) if stepping or worker.has_news else 0.0
        return worker.call_roll(
            stepping=stepping,
            finishing=finishing,
            measure=weight,
            weight=weight if self._draws(worker) else 0.0,
        )

    def after_step(self, worker: Worker) -> bool:
        """The mean, at the end of a round."""
        state: FedAvgState = worker.state
        state.steps_in_round += 1
        if state.roll is None:
            return False
        roll, state.roll = state.roll.wait(), None
        worker.record["drawn"] = self._end_round(worker, roll)
        return True

    def _end_round(self, worker: Worker, roll: Roll) -> bool:
        """Average, and take the mean or not. Returns whether this worker was drawn."""
        state: FedAvgState = worker.state
        drawn = self._draws(worker)
        worker.average(roll, take=drawn or self.unselected == "restart")
        state.rounds += 1
        state.steps_in_round = 0
        state.drawn += drawn
        worker.details.update(rounds=state.rounds, drawn=state.drawn)
        return drawn

    def answer(self, worker: Worker, *, finishing: bool) -> Roll:
        """Take part in the next round, if there is one."""
        roll = self._call(worker, stepping=False, finishing=finishing).wait()
        if roll.stepping:
            self._end_round(worker, roll)
        return roll

    def consensus(self, worker: Worker, roll: Roll) -> None:
        """The mean of all models; of those that have moved if the last round made all equal."""
        own, total = self._weight(worker), float(worker.size)
        if self.unselected == "restart" or self._count(worker.size) == worker.size:
            own, total = own * worker.has_news, roll.measure
        everyone = dataclasses.replace(roll, weight=total, own_weight=own)
        worker.average(everyone, exact=True, what="consensus")
