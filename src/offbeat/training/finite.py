"""What becomes of a round to which a worker would contribute NaN or infinity."""

import logging
from collections.abc import Callable, Collection
from dataclasses import replace

from offbeat.errors import OffbeatError
from offbeat.strategies.base import NonFinite, Strategy, Worker
from offbeat.strategies.roll import Ballot, Roll

logger = logging.getLogger("offbeat")


class Heed:
    """Lets training go on with a roll, or not.

    It holds neither the worker nor the strategy: their state may keep a round that is under way,
    and with it this, so that all of them would live until a garbage collection.

    Args:
        rank: Of this worker.
        policy: What to do; see ``Finite``.
        known: What the strategy could do.
        nobody: ``Strategy.nobody``.
    """

    def __init__(
        self,
        rank: int,
        policy: NonFinite,
        known: Collection[NonFinite],
        nobody: Callable[[Roll], bool],
    ) -> None:
        self._rank, self._policy, self._known, self._nobody = rank, policy, known, nobody
        self._told = False

    def __call__(self, roll: Roll, step: int) -> Roll:
        """The roll, if training goes on.

        Raises:
            OffbeatError: as ``non_finite`` says; or everybody would have to be left out.
        """
        if not roll.not_finite:
            return roll
        who = f"rank {roll.who}" if roll.who is not None else f"{roll.not_finite} workers"
        found = f"{who} would contribute NaN or infinity to the mean at step {step}"
        if self._policy == "raise":
            raise OffbeatError(f'{found}; the models are as before (non_finite="raise")')
        if self._policy == "leave_out" and self._nobody(roll):
            raise OffbeatError(f'{found}, and nobody else anything (non_finite="leave_out")')
        if not self._told:
            self._told = True
            logger.warning("rank %d: %s%s", self._rank, found, self._consequence())
        return roll

    def _consequence(self) -> str:
        if self._policy == "leave_out":
            return ": left out, and later ones without a word"
        others = [f'"{one}"' for one in self._known if one != "warn"]
        if not others:
            return ""
        return f", and so to all workers; attach(..., non_finite={' or '.join(others)}) prevents it"


class Finite:
    """Looks at what this worker contributes, tells the others in the roll, and does as was asked.

    Args:
        strategy: Knows what is about to be contributed.
        worker: This worker.
        non_finite: "warn" logs the first time, and the mean is what it is; "raise" raises on all
            workers; "leave_out" gives such a worker weight 0.

    Attributes:
        heed: What is done about a roll.
    """

    def __init__(self, strategy: Strategy, worker: Worker, non_finite: NonFinite) -> None:
        self._strategy, self._worker, self._policy = strategy, worker, non_finite
        worker.guarded, worker.leaves_out = non_finite != "warn", non_finite == "leave_out"
        self.heed = Heed(worker.rank, non_finite, strategy.non_finite, strategy.nobody)

    def look(self, part: int, *, stepping: bool) -> bool:
        """Whether what this worker is about to contribute is finite, if it contributes."""
        worker, strategy = self._worker, self._strategy
        worker.left_out = False
        if worker.size == 1 or not (stepping or worker.has_news):
            return True
        finite = strategy.finite(worker, part, stepping=stepping)
        if not finite and worker.leaves_out:
            worker.left_out = True
            if strategy.rounds == "boundary" or not stepping:  # else it is about to step
                strategy.restore(worker)
        if worker.untold:
            worker.left_out, worker.untold, finite = True, False, False
        return finite

    def mark(self, ballot: Ballot, finite: bool) -> Ballot:
        """The ballot as it is sent."""
        if finite or (ballot.stepping and not ballot.weight):  # not drawn, say
            return ballot
        worker = self._worker
        worker.details["not_finite"] = worker.details.get("not_finite", 0) + 1
        weight = 0.0 if self._policy == "leave_out" else ballot.weight
        return replace(ballot, weight=weight, rank=worker.rank, finite=False)

    def acted(self, *, synchronized: bool) -> None:
        """A round has ended: who was left out has the others' mean, and needs a state to match."""
        if synchronized and self._worker.left_out:
            self._worker.forget_not_finite()
