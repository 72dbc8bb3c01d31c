"""Rounds, in which all workers decide together what to average, if anything.

Each worker sends a *vote*, a list of numbers. All workers gather the votes and add them up. The
strategy reads the *summed votes*. Every worker takes part in every round, so all workers make the
same decisions and start the same operations in the same order. A worker without further data votes
with ``stepping=False`` until no worker takes a step. The workers may therefore take different
numbers of steps.
"""

import functools
import logging
import operator
from collections.abc import Sequence

from offbeat.averaging.votes import CALLS, NO_CONSENSUS, Round, Vote
from offbeat.averaging.worker import NonFinite, Worker
from offbeat.errors import MismatchError, OffbeatError
from offbeat.transport.future import Completed

logger = logging.getLogger("offbeat")
_SECONDS = 5.0  # wait before the first warning; doubled for each further warning
_STEPS = 10  # smallest number of steps by the other workers together before a warning
# Bits of the calls that all workers must make together. Only consensus() and finish() may meet.
_SAME_CALL = sum(CALLS.values()) - CALLS["consensus()"] - CALLS["finish()"]


class VoteCheck:
    """Checks the votes of all workers in each round, and adds them up.

    Args:
        rank: Rank of this worker.
        policy: Argument ``non_finite`` of ``attach``.
        optimizers: Names of the optimizers' classes, in the order given to ``attach``.
    """

    # Holds neither the flow nor the worker, because a round in progress holds this object and must
    # not keep them alive.

    def __init__(self, rank: int, policy: NonFinite, optimizers: Sequence[str] = ()) -> None:
        self._rank, self._policy, self._optimizers = rank, policy, optimizers
        self._logged = False

    def __call__(self, rows: Sequence[Sequence[float]]) -> Vote:
        """Return the sum of the votes. ``rows`` contains one vote for each worker, by rank.

        If a worker reports non-finite values, the policy applies on all workers. With "warn" only
        the first case is logged.

        Raises:
            MismatchError: the workers step different optimizers, wait in calls that do not
                belong together, or a worker has finished without ``consensus()``. All raise it.
            OffbeatError: the workers are in different rounds, or the policy is "raise", and a
                worker reports non-finite values.
        """
        votes = [Vote.of(row) for row in rows]
        for rank, vote in enumerate(votes):
            if vote.round != votes[0].round:
                raise OffbeatError(
                    "the workers are not in the same round: rank 0 is in round "
                    f"{votes[0].round:.0f}, rank {rank} in round {vote.round:.0f}. One of them may "
                    "have continued after an interruption: detach() and attach again on all workers"
                )
        self._require_match(votes)
        self._require_consensus(votes)
        wrong = [rank for rank, vote in enumerate(votes) if not vote.finite]
        if wrong:
            self.report(wrong, votes[wrong[0]].step)
        sums = Vote.of([sum(column) for column in zip(*rows, strict=True)])
        call = functools.reduce(operator.or_, (int(vote.call) for vote in votes))
        return sums._replace(call=call, optimizer=max(vote.optimizer for vote in votes))

    def _require_match(self, votes: Sequence[Vote]) -> None:
        """Raise MismatchError if two workers are in calls or steps that do not match."""
        found = [rank for rank, vote in enumerate(votes) if int(vote.call) & _SAME_CALL]
        if found:
            first = votes[found[0]]
            same_step = not first.is_in("mean()")
            # A worker that still steps may make the call later, when it reaches the same step.
            others = [
                rank
                for rank, vote in enumerate(votes)
                if (
                    same_step and vote.step > first.step
                    if vote.stepping
                    else vote.call != first.call
                )
            ]
            advice = f"all workers call the same methods{' at the same step' * same_step}"
        else:
            found = [rank for rank, vote in enumerate(votes) if vote.stepping][:1]
            others = [
                rank
                for rank, vote in enumerate(votes)
                if vote.stepping and vote.optimizer != votes[found[0]].optimizer
            ]
            advice = "step all optimizers equally often and in the same order on every rank"
        if others:
            raise self._mismatch(votes, found[0], others[0], advice)

    def _require_consensus(self, votes: Sequence[Vote]) -> None:
        """Raise MismatchError if a worker has ended training and left out a consensus.

        A worker whose data ends early takes part in a later consensus of the others. But a worker
        in ``finish`` with more steps than one of these, and without any ``consensus``, has passed
        theirs.
        """
        waiting = [rank for rank, vote in enumerate(votes) if vote.is_in("consensus()")]
        for rank, vote in enumerate(votes):
            if waiting and vote.is_in("finish()") and vote.has(NO_CONSENSUS):
                first = min(waiting, key=lambda other: votes[other].step)
                if vote.step > votes[first].step:
                    advice = "call consensus() on every rank, and test sync.rank inside its block"
                    raise self._mismatch(votes, first, rank, advice)

    def _mismatch(self, votes: Sequence[Vote], one: int, other: int, advice: str) -> MismatchError:
        texts = [f"rank {rank} {self._doing(votes[rank])}" for rank in sorted([one, other])]
        return MismatchError(f"{', '.join(texts)}: {advice}")

    def _doing(self, vote: Vote) -> str:
        if vote.stepping:
            index = int(vote.optimizer)
            kind = f" ({self._optimizers[index]})" if index < len(self._optimizers) else ""
            return f"steps optimizer {index}{kind} at step {vote.step:.0f}"
        name = next((name for name in CALLS if vote.is_in(name)), "no call")
        return f"is in {name} after step {vote.step:.0f}"

    def report(self, ranks: Sequence[int], step: float) -> None:
        """Apply the policy to the ``ranks``, which would contribute non-finite values."""
        names = ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
        message = f"{names} would contribute NaN or infinity to the mean at step {step:.0f}"
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


class Rounds:
    """Numbers and sends the votes of one worker.

    The numbers start at 0 in each generation, a period with the same group of workers.

    Attributes:
        check: Checks the votes of all workers in a round, and adds them up.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker, self._next = worker, 0
        names = [type(each.optimizer).__name__ for each in worker.optimizers]
        self.check = VoteCheck(worker.rank, worker.non_finite, names)

    def number(self, vote: Vote) -> Vote:
        """Return ``vote`` for the next round: with its number, and with the state of the worker."""
        worker, number = self._worker, self._next
        self._next += 1
        call = CALLS.get(worker.call, 0) + worker.call_bits
        return vote._replace(round=number, step=worker.step, call=call)

    def send(self, vote: Vote) -> Round:
        """Number a vote and send it in a message of its own."""
        worker, vote = self._worker, self.number(vote)
        if worker.size == 1:
            return Round(vote, Completed(vote))
        # Gathering takes fewer messages in sequence than a sum, which takes 2(N−1).
        what = f"votes at step {worker.step}"
        rows = worker.team.communicator.gather_numbers(vote.row(), what=what)
        # ``check`` does not hold ``self``: a pending round must not keep the worker alive.
        return Round(vote, rows.then(self.check))


class WaitingWarning:
    """Logs a warning if this worker waits for a consensus while the other workers train.

    The others may legitimately take more steps before they enter the consensus, so this is no
    error. The usual mistake is a ``consensus`` inside ``if rank == 0``.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker, self._start = worker, worker.team.host.now()
        self._first: float | None = None  # sum of the steps of all workers in the first round
        self._next_seconds = _SECONDS

    def __call__(self, sums: Vote) -> None:
        """Handle the sum of the votes of a round in which other workers take a step."""
        if self._first is None:
            self._first = sums.step
        worker = self._worker
        seconds, steps = worker.team.host.now() - self._start, sums.step - self._first
        if seconds < self._next_seconds or steps < _STEPS:
            return
        while self._next_seconds <= seconds:
            self._next_seconds *= 2
        logger.warning(
            "rank %d has waited in %s for %.0f s; the other workers have taken %d steps since. "
            'Every rank must call it, not only rank %d: see "Coming from DDP" in the documentation',
            worker.rank,
            worker.call,
            seconds,
            steps,
            worker.rank,
        )
