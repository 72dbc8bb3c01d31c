"""The roll: what every worker puts into the decision of a round, summed over all.

It tells how many workers are still stepping, so a worker that has run out of data goes on taking
part with weight 0 until all have, and workers may take different numbers of steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from offbeat.errors import OffbeatError
from offbeat.fabric import Handle

_NOT_FINITE = 4096  # what a worker whose numbers are not finite adds to two counts; see ``Ballot``
_WRAP = 1024  # numbers of rounds are sent modulo this, so that their sum is exact in float32


@dataclass(frozen=True)
class Vote:
    """What an algorithm contributes to the decision of a round.

    Attributes:
        weight: Of this worker in a mean of models. None: 1 if it steps or has own steps that no
            mean has seen, else 0.
        flag: Whether it asks for a synchronization.
        measure: A number of the algorithm's own.
        more: Further ones; always as many.
    """

    weight: float | None = None
    flag: bool = False
    measure: float = 0.0
    more: tuple[float, ...] = ()


@dataclass(frozen=True)
class Ballot:
    """A worker's numbers for one roll.

    Attributes:
        weight: Of its vote, or the default.
        stepping: Whether it takes a step in this round.
        finishing: Whether it is inside ``finish``.
        flag: Of its vote.
        measure: Of its vote.
        view: Number of the team's view.
        round: Number of the round.
        more: Of its vote.
        rank: This worker's.
        finite: Whether all numbers are that it is about to contribute.

    Who is not finite is told for nothing, in numbers that travel anyhow: it adds 4096 to the count
    of those who finish, and (rank + 1)·4096 to that of flags. Both stay exact in float64; in
    float32, too, for one such worker, and that suffices for gradients, where there are no flags.
    """

    weight: float
    stepping: bool
    finishing: bool
    flag: bool
    measure: float
    view: int
    round: int
    more: tuple[float, ...] = ()
    rank: int = 0
    finite: bool = True

    SLOTS: ClassVar[int] = 7  # and those of ``more``

    def values(self) -> list[float]:
        """The numbers, to be summed over the workers."""
        common = [float(self.view % _WRAP), float(self.round % _WRAP)]
        counts = [float(self.stepping), float(self.finishing), float(self.flag)]
        if not self.finite:
            counts[1] += _NOT_FINITE
            counts[2] += _NOT_FINITE * (self.rank + 1)
        return [self.weight, *counts, self.measure, *common, *self.more]

    def read(self, sums: Sequence[float], workers: int) -> "Roll":
        """The roll, from the sums of the numbers of so many ``workers``.

        Raises:
            OffbeatError: they do not belong to the same round.
        """
        weight, stepping, finishing, flag, measure, view, number, *more = sums
        here = [self.view % _WRAP * workers, self.round % _WRAP * workers]
        if [round(view), round(number)] != here:
            raise OffbeatError(
                f"the workers are not in the same round: this one is in round {self.round} of view "
                f"{self.view}. One of them went on after an interruption, perhaps: detach() and "
                "attach again on all"
            )
        not_finite, finishing = divmod(round(finishing), _NOT_FINITE)
        ranks, flag = divmod(round(flag), _NOT_FINITE)
        counts = round(stepping), finishing, flag
        who = ranks - 1 if not_finite == 1 else None
        return Roll(weight, *counts, measure, self, tuple(more), not_finite, who)


@dataclass(frozen=True)
class Roll:
    """What all workers of a round put in, summed.

    Attributes:
        weight: Total weight of a mean of models.
        stepping: Workers that take a step in this round; 0 once all have arrived.
        finishing: Workers inside ``finish``.
        flag: Workers that ask for a synchronization.
        measure: Sum of a number of the strategy's own.
        own: What this worker put in.
        more: Sums of its further ones.
        not_finite: Workers that are about to contribute numbers that are not finite.
        who: The rank of the only such worker; None of several.
    """

    weight: float
    stepping: int
    finishing: int
    flag: int
    measure: float
    own: Ballot
    more: tuple[float, ...] = ()
    not_finite: int = 0
    who: int | None = None


@dataclass(frozen=True)
class Round(Handle[Roll]):
    """A round under way; ``wait`` gives its roll.

    Attributes:
        part: Index of the optimizer with ``rounds="gradients"``, else 0.
        own: What this worker put in.
        handle: The roll on its way.
    """

    part: int
    own: Ballot
    handle: Handle[Roll]

    @override
    def done(self) -> bool:
        return self.handle.done()

    @override
    def wait(self) -> Roll:
        return self.handle.wait()
