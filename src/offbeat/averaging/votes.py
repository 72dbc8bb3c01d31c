"""Votes and tallies.

``offbeat.averaging.rounds`` explains them. A worker that waits at a barrier votes, but takes no
step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from offbeat.errors import OffbeatError
from offbeat.strategies.base import Tally
from offbeat.transport.handle import Completed, Handle

WEIGHT, WANTED, STEP = 0, 4, 6  # positions in an encoded vote
_ALSO = 4096  # see ``Vote.also``
_NON_FINITE = 4096  # see ``Vote``
# View and round are sent as one number below 4096. Its sum over up to 4096 workers is below 2²⁴ and
# thus exact in float32.
_WRAP = 4096


@dataclass(frozen=True)
class Vote:
    """One worker's contribution to the tally of a round.

    Attributes:
        weight: Weight of this worker in the mean (≥ 0).
        stepping: True if this worker takes a step in this round.
        finishing: True if this worker has called ``Synchronizer.finish`` to end training.
        wanted: Return value of ``Strategy.due``: the number of parts of the model that this worker
            wants to average. 0 if this worker takes no step. In a message of ``ClockedAverager``:
            the time from sending to arrival of the previous message, in local steps of this worker.
            Infinite if it is unknown.
        view: Number of the view. A new view begins when a worker joins or is lost.
        round: Number of the round in this view.
        finite: False if this worker's contribution is known to contain NaN or infinity.
        rank: Rank of this worker.
        also: True if this worker waits at a barrier, and has modules to average together with the
            model. Then ``stepping`` is False, and the number that reports it is 4096.
        numbers: Return value of ``Strategy.vote``.
        step: Number of local steps of this worker.

    One number contains ``view`` and ``round``, which must be equal on all workers. One number
    reports non-finite values: 0 if ``finite``, else 1 + 4096·(rank + 1). For example, if
    only rank 2 has non-finite values, the sum over the workers is 1 + 4096·3. ``tally`` splits it
    by ``divmod`` into 3 and 1: one worker, with rank 3 − 1. If several workers have non-finite
    values, their number is known, but not their ranks. Votes that are sent together with gradients
    may be summed in float32. The sum is then exact if only one worker has non-finite values, and
    its rank is below 4095.
    """

    weight: float
    stepping: bool
    finishing: bool
    wanted: float
    view: int
    round: int
    finite: bool
    rank: int
    also: bool = False
    numbers: tuple[float, ...] = ()
    step: int = 0

    SLOTS: ClassVar[int] = 7  # length of an encoded vote without ``numbers``

    def encode(self) -> list[float]:
        """Return the vote as a list of numbers, which is summed over the workers."""
        non_finite = 0 if self.finite else 1 + _NON_FINITE * (self.rank + 1)
        return [
            self.weight,
            float(self.stepping + _ALSO * self.also),
            float(self.finishing),
            float(non_finite),
            self.wanted,
            float(self._common()),
            float(self.step),
            *self.numbers,
        ]

    def _common(self) -> int:
        """Return a number that is equal on all workers in the same round."""
        return (31 * self.view + self.round) % _WRAP

    def tally(self, sums: Sequence[float], workers: int) -> "Sums":
        """Decode the elementwise sums of the encoded votes of all ``workers``.

        Raises:
            OffbeatError: the sums show that the workers are not all in this worker's round.
        """
        weight, stepping, finishing, encoded, wanted, common, steps, *numbers = sums
        if round(common) != self._common() * workers:
            raise OffbeatError(
                f"the workers are not in the same round: this one is in round {self.round} of view "
                f"{self.view}. One of them may have continued after an interruption: detach() and "
                "attach again on all workers"
            )
        ranks, non_finite = divmod(round(encoded), _NON_FINITE)
        return Sums(
            weight=weight,
            stepping=round(stepping) % _ALSO,
            finishing=round(finishing),
            also=round(stepping) // _ALSO,
            wanted=wanted,
            non_finite=non_finite,
            non_finite_rank=ranks - 1 if non_finite == 1 else None,
            numbers=tuple(numbers),
            steps=round(steps),
        )


@dataclass(frozen=True)
class Sums:
    """The votes of a round, summed over the workers.

    Attributes:
        weight: Sum of the weights.
        stepping: Number of workers that take a step in this round. 0 if all wait at a barrier.
        finishing: Number of workers that end training.
        also: Number of workers that have modules to average together with the model.
        wanted: Sum of ``Vote.wanted``.
        non_finite: Number of workers with non-finite values.
        non_finite_rank: Rank of the worker with non-finite values. None unless it is the only one.
        numbers: Sums of ``Vote.numbers``.
        steps: Sum of the local steps. In float32 it is rounded above 2²⁴.
    """

    weight: float
    stepping: int
    finishing: int
    wanted: float
    also: int = 0
    non_finite: int = 0
    non_finite_rank: int | None = None
    numbers: tuple[float, ...] = ()
    steps: int = 0


@dataclass(frozen=True)
class Round(Handle[Sums]):
    """A round in progress or complete. ``wait`` returns the sums of the votes.

    Attributes:
        optimizer: Index of the optimizer whose gradients are averaged. 0 if models are averaged.
        own: Vote of this worker.
        handle: The sums of the votes.
    """

    optimizer: int
    own: Vote
    handle: Handle[Sums]

    @override
    def done(self) -> bool:
        return self.handle.done()

    @override
    def wait(self) -> Sums:
        return self.handle.wait()

    def tally(self) -> Tally:
        """Return the sums for the strategy. Reading an attribute of ``Tally`` waits for them."""

        def read() -> tuple[int, float, tuple[float, ...]]:
            sums = self.wait()
            return sums.stepping, sums.wanted, sums.numbers

        return Tally(read)

    def flat(self) -> list[float]:
        """Return what a checkpoint needs of the round, as plain numbers. Waits for the sums."""
        sums = self.wait()
        weights = [float(self.own.stepping), self.own.weight, sums.weight]
        return [*weights, float(sums.stepping), sums.wanted, *sums.numbers]

    @classmethod
    def saved(cls, values: Sequence[float]) -> "Round":
        """Restore a complete round from the numbers that ``flat`` returned."""
        stepping, own_weight, weight, count, wanted, *numbers = values
        vote = Vote(own_weight, bool(stepping), False, 0.0, 0, 0, True, 0)
        sums = Sums(weight, round(count), 0, wanted, numbers=tuple(numbers))
        return cls(0, vote, Completed(sums))
