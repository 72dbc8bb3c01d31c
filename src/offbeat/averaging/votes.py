"""The votes of a round, and their sum.

``offbeat.averaging.rounds`` explains rounds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from offbeat.strategies.base import SummedVotes
from offbeat.transport.future import Future

CALLS = {
    "consensus()": 1,
    "finish()": 2,
    "offbeat.save()": 4,
    "offbeat.load()": 8,
    "state_dict()": 16,
    "load_state_dict()": 32,
    "mean()": 64,
}
"""Public calls that wait for all workers. Each has a bit in ``Vote.call``."""
# Further bits of ``Vote.call``:
ALSO = 128  # the worker averages further modules (``also=…``)
UNAVERAGED = 256  # tensors that training does not average have changed, or are new
NO_CONSENSUS = 512  # the worker has never called consensus()
NEEDS_MEAN = 1024  # in consensus(): the worker needs the mean. If none does, it is not computed


class Vote(NamedTuple):
    """One worker's contribution to a round: numbers that all workers gather in float64.

    The elementwise sum over the workers is a ``Vote``, too: its ``stepping`` is the number of
    workers that take a step. In a single vote a condition is 1 if it is true, else 0.

    Attributes:
        weight: Weight of this worker in the mean (≥ 0).
        stepping: 1 if this worker takes a step in this round. 0 if it waits at a barrier.
        call: Bits of the public call (``CALLS``) in which this worker waits at a barrier, and
            the further bits where they apply. 0 if it does not wait. The sum has the
            bits of all workers.
        optimizer: Index of the optimizer that takes this step, in the list passed to ``attach``, if
            gradients are averaged. 0 if models are averaged, or in a vote without a step. The sum
            has the index of the workers that take a step.
        flight_steps: Time from sending to arrival of the previous message of ``ClockedAverager``,
            in local steps of this worker. Infinite if it is unknown, and 0 in other rounds.
        finite: 0 if this worker's contribution is known to contain NaN or infinity.
        round: Number of the round since the group of workers changed, the same on all workers.
        step: Number of local steps of this worker.
        numbers: Return value of ``Strategy.vote``. ``ClockedAverager`` appends a processor time.
    """

    weight: float = 0.0
    stepping: float = 0.0
    call: float = 0.0
    optimizer: float = 0.0
    flight_steps: float = 0.0
    finite: float = 1.0
    round: float = 0.0
    step: float = 0.0
    numbers: tuple[float, ...] = ()

    def is_in(self, call: str) -> bool:
        """Return True if this worker waits in ``call``. For the sum: if any worker does."""
        return bool(int(self.call) & CALLS[call])

    def has(self, bit: int) -> bool:
        """Return True if ``call`` has one of the further bits."""
        return bool(int(self.call) & bit)

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
    """

    own: Vote
    sums: Future[Vote]

    def wait(self) -> Vote:
        """Wait for the votes of all workers, and return their sum."""
        return self.sums.wait()


def summed_votes(sums: Future[Vote]) -> SummedVotes:
    """Return the sum of the votes for the strategy. Reading an attribute of it waits for them."""

    def read() -> tuple[int, tuple[float, ...]]:
        vote = sums.wait()
        return int(vote.stepping), vote.numbers

    return SummedVotes(read)
