"""Rounds, in which all workers decide together what to average, if anything.

Each worker sends a *vote*, a list of numbers. All workers receive the same *tally*, the sum of the
votes. Every worker takes part in every round, so all workers make the same decisions and start the
same operations in the same order. A worker without further data votes with ``stepping=False`` until
no worker takes a step. The workers may therefore take different numbers of steps.
"""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from offbeat.averaging.votes import Round, Sums, Vote
from offbeat.averaging.worker import NonFinite, Worker
from offbeat.errors import OffbeatError
from offbeat.transport.handle import Completed

logger = logging.getLogger("offbeat")
_SECONDS = 5.0  # wait before the first warning; doubled for each further warning
_STEPS = 10  # smallest number of steps by the other workers together before a warning


class NonFiniteCheck:
    """Applies the policy for non-finite contributions to the tally of each round, on all workers.

    Args:
        rank: Rank of this worker.
        policy: Argument ``non_finite`` of ``attach``.
    """

    # Holds neither the flow nor the worker, because a round in progress holds this object and must
    # not keep them alive.

    def __init__(self, rank: int, policy: NonFinite) -> None:
        self._rank, self._policy, self._logged = rank, policy, False

    def __call__(self, sums: Sums, step: int) -> Sums:
        """Apply the policy to ``sums``, the tally of a round, and return ``sums`` unchanged.

        With "warn" only the first case is logged. ``step`` is used in messages.

        Raises:
            OffbeatError: the policy is "raise", and a worker reports non-finite values.
        """
        if not sums.non_finite:
            return sums
        name = f"{sums.non_finite} workers"
        if sums.non_finite_rank is not None:
            name = f"rank {sums.non_finite_rank}"
        message = f"{name} would contribute NaN or infinity to the mean at step {step}"
        if self._policy == "raise":
            raise OffbeatError(
                f'{message}; no other model has received it (non_finite="raise"). Check the data '
                "and the learning rate there, and continue from the last checkpoint"
            )
        if not self._logged:
            self._logged = True
            logger.warning(
                'rank %d: %s: all workers receive it; non_finite="raise" prevents that',
                self._rank,
                message,
            )
        return sums


class Rounds:
    """Makes and sends the votes of one worker, and numbers the rounds.

    The numbers start at 0 in each view, that is, for each composition of the group of workers.

    Attributes:
        check: Applies the policy for non-finite contributions to each tally.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker, self._next = worker, 0
        self.check = NonFiniteCheck(worker.rank, worker.non_finite)

    def vote(
        self,
        *,
        weight: float,
        stepping: bool,
        finishing: bool,
        wanted: float = 0.0,
        finite: bool = True,
        numbers: tuple[float, ...] = (),
    ) -> Vote:
        """Return this worker's vote for the next round, without sending it; see ``Vote``."""
        worker = self._worker
        vote = Vote(
            weight=weight,
            stepping=stepping,
            finishing=finishing,
            wanted=wanted,
            view=worker.team.view,
            round=self._next,
            finite=finite,
            rank=worker.rank,
            also=worker.also,
            numbers=numbers,
            step=worker.step,
        )
        self._next += 1
        return vote

    def send(self, vote: Vote, optimizer: int = 0) -> Round:
        """Send a vote in a separate message. ``optimizer``: see ``Round``."""
        worker, values, size = self._worker, vote.encode(), self._worker.size
        if size == 1:
            return self.from_sums(vote, values, optimizer)
        communicator = worker.team.communicator
        tensor = torch.tensor(values, dtype=torch.float64, device=communicator.control_device)
        # A sum would take 2(N−1) messages in sequence.
        handle = communicator.gather(tensor, what=f"votes at step {worker.step}")
        # The lambda does not capture ``self``: a pending round must not keep the worker alive.
        check, step = self.check, worker.step
        sums = handle.then(lambda votes: check(vote.tally(_sum(votes), size), step))
        return Round(optimizer, vote, sums)

    def from_sums(self, vote: Vote, sums: Sequence[float], optimizer: int) -> Round:
        """Return a round whose votes were summed elsewhere, for example together with gradients.

        ``sums`` are the elementwise sums of the encoded votes of all workers.
        """
        tally = self.check(vote.tally(sums, self._worker.size), self._worker.step)
        return Round(optimizer, vote, Completed(tally))


def _sum(votes: Sequence[Tensor]) -> list[float]:
    """Return the elementwise sum, added in the order of the ranks: the same on all workers."""
    return [sum(numbers) for numbers in zip(*(vote.tolist() for vote in votes), strict=True)]


class WaitingWarning:
    """Logs a warning if this worker waits for a consensus while the other workers train.

    The others may legitimately take more steps before they enter the consensus, so this is no
    error. The usual mistake is a ``consensus`` inside ``if rank == 0``.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker, self._start = worker, worker.team.host.now()
        self._first: int | None = None  # sum of the steps of all workers in the first round
        self._next_seconds = _SECONDS

    def __call__(self, sums: Sums) -> None:
        """Handle the tally of a round in which other workers take a step."""
        if self._first is None:
            self._first = sums.steps
        worker = self._worker
        seconds, steps = worker.team.host.now() - self._start, sums.steps - self._first
        if seconds < self._next_seconds or steps < _STEPS:
            return
        while self._next_seconds <= seconds:
            self._next_seconds *= 2
        logger.warning(
            "rank %d has waited in consensus() or offbeat.save() for %.0f s; the other workers "
            "have taken %d steps since. Every rank must call it, not only rank %d: see "
            '"Coming from DDP" in the documentation',
            worker.rank,
            seconds,
            steps,
            worker.rank,
        )
