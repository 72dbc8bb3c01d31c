"""Rounds: the workers exchange votes, and every worker receives the same tally.

Every worker takes part in every round, so it starts all operations that the other workers start. A
worker that has run out of data keeps voting with ``stepping=False`` until all workers have. So
workers may take different numbers of steps.
"""

from collections.abc import Sequence

import torch

from offbeat.averaging.finite import NonFiniteCheck
from offbeat.averaging.votes import Round, Sums, Vote
from offbeat.averaging.worker import Worker
from offbeat.transport.handle import Completed, Handle


class Rounds:
    """Numbers the rounds of one view and sends the votes.

    Args:
        worker: This worker.
        check: Policy for non-finite values, applied to each tally.
    """

    def __init__(self, worker: Worker, check: NonFiniteCheck) -> None:
        self._worker, self._check, self._next = worker, check, 0

    def vote(
        self,
        *,
        weight: float,
        stepping: bool,
        finishing: bool,
        wanted: float,
        finite: bool,
        numbers: tuple[float, ...],
    ) -> Vote:
        """Return this worker's vote in the next round. The arguments are those of ``Vote``."""
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
            numbers=numbers,
            measured=worker.wire.measurements(worker.step, stepping=stepping),
        )
        self._next += 1
        return vote

    def send(self, vote: Vote, optimizer: int = 0) -> Round:
        """Send a vote in a separate message, and return the round in progress."""
        worker, values, size = self._worker, vote.encode(), self._worker.size
        if size == 1:
            return self.arrived(vote, values, optimizer)
        communicator = worker.team.communicator
        tensor = torch.tensor(values, dtype=torch.float64, device=communicator.control_device)
        handle = communicator.sum(tensor, what=f"votes at step {worker.step}")
        sums = handle.then(lambda total: vote.tally(total.tolist(), size))
        return Round(optimizer, vote, self._checked(sums))

    def arrived(self, vote: Vote, sums: Sequence[float], optimizer: int) -> Round:
        """Return a round whose sums have already arrived, as part of another message."""
        tally = Completed(vote.tally(sums, self._worker.size))
        return Round(optimizer, vote, self._checked(tally))

    def _checked(self, sums: Handle[Sums]) -> Handle[Sums]:
        # The closure must not hold the worker: a flow's state may keep a round, and so itself.
        check, step = self._check, self._worker.step
        return sums.then(lambda tally: check(tally, step))
