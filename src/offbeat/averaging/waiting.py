"""A warning while one worker waits at a barrier that the other workers do not reach."""

import logging

from offbeat.averaging.votes import Sums
from offbeat.averaging.worker import Worker

logger = logging.getLogger("offbeat")
_SECONDS = 5.0  # wait before the first warning; doubled for each further warning
_STEPS = 10  # smallest number of steps by the other workers together before a warning


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
            '"Evaluate" in the quickstart',
            worker.rank,
            seconds,
            steps,
            worker.rank,
        )
