"""The votes of a round, and their sum.

``offbeat.averaging.rounds`` explains rounds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from offbeat.strategies.base import Tally
from offbeat.transport.handle import Handle


class Vote(NamedTuple):
    """One worker's contribution to a round: numbers that all workers gather in float64.

    The elementwise sum over the workers is a ``Vote``, too: its ``stepping`` is the number of
    workers that take a step. In a single vote a condition is 1 if it is true, else 0.

    Attributes:
        weight: Weight of this worker in the mean (≥ 0).
        stepping: 1 if this worker takes a step in this round. 0 if it waits at a barrier.
        finishing: 1 if this worker has called ``Synchronizer.finish`` to end training.
        also: 1 if this worker waits for ``consensus(also=…)``, which averages further modules.
        wanted: Return value of ``Strategy.due``: the number of parts of the model that this worker
            wants to average. 0 if this worker takes no step. In a message of ``ClockedAverager``:
            the time from sending to arrival of the previous message, in local steps of this worker.
            Infinite if it is unknown.
        finite: 0 if this worker's contribution is known to contain NaN or infinity.
        round: Number of the round since the group of workers changed, the same on all workers.
        step: Number of local steps of this worker.
        numbers: Return value of ``Strategy.vote``. ``ClockedAverager`` appends a processor time.
    """

    weight: float = 0.0
    stepping: float = 0.0
    finishing: float = 0.0
    also: float = 0.0
    wanted: float = 0.0
    finite: float = 1.0
    round: float = 0.0
    step: float = 0.0
    numbers: tuple[float, ...] = ()

    def row(self) -> list[float]:
        """Return the vote as a list of numbers, which a message contains."""
        return [*self[:-1], *self.numbers]

    @classmethod
    def of(cls, row: Sequence[float]) -> "Vote":
        """Return the vote whose ``row`` a message contained."""
        count = len(cls._fields) - 1
        return cls._make([*row[:count], tuple(row[count:])])


@dataclass(frozen=True)
class Round:
    """A round in progress or complete.

    Attributes:
        own: Vote of this worker.
        sums: The sum of all workers' votes.
        optimizer: Index of the optimizer whose gradients are averaged. 0 if models are averaged.
    """

    own: Vote
    sums: Handle[Vote]
    optimizer: int = 0

    def wait(self) -> Vote:
        """Wait for the votes of all workers, and return their sum."""
        return self.sums.wait()


def tally_of(sums: Handle[Vote]) -> Tally:
    """Return the sum of the votes for the strategy. Reading an attribute of it waits for them."""

    def read() -> tuple[int, float, tuple[float, ...]]:
        vote = sums.wait()
        return int(vote.stepping), vote.wanted, vote.numbers

    return Tally(read)
