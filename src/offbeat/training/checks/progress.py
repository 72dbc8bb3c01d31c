"""Comparison of the workers: of their steps at a consensus, of their models at the end."""

import logging
from collections.abc import Sequence

import torch

from offbeat.averaging import Worker
from offbeat.averaging.votes import Sums
from offbeat.checkpoint.state import digest
from offbeat.errors import MismatchError
from offbeat.strategies.base import Strategy

logger = logging.getLogger("offbeat")


class Progress:
    """Finds a ``consensus`` on one rank only, and changes of parameters that were not averaged.

    Attributes:
        called: True once this worker has called ``Synchronizer.consensus``.
    """

    def __init__(self, worker: Worker, strategy: Strategy) -> None:
        self._worker, self._strategy, self.called = worker, strategy, False
        self._start = 0

    def note_start(self) -> None:
        """Store a checksum of the model from which training starts."""
        self._start = self._checksum()

    def _checksum(self) -> int:
        team = self._worker.team
        if team.everyone.size == 1 or team.sharded:
            return 0
        return digest([p for _, p in self._worker.replica.parameters])

    # -- comparison ------------------------------------------------------------------------------

    def compare(self, sums: Sums, *, finishing: bool) -> None:
        """Compare the workers before a consensus, if some of them end training in it.

        All workers see this in ``sums``, the tally of the last round, and then exchange their
        steps. ``finishing`` is True if this worker ends training.

        Raises:
            MismatchError: one worker has called ``consensus``, and all others end training after at
                least twice as many steps, and have never called it. Raised on all workers. In other
                cases workers may have stopped early, which is allowed.
        """
        if not 0 < sums.finishing < self._worker.size:
            return
        numbers = [finishing, self._worker.step, self.called]
        reports = self._gather("comparison of the progress", numbers)
        inside = [rank for rank, (ends, *_) in enumerate(reports) if not ends]
        rank, steps = inside[0], reports[inside[0]][1]
        ended = [(step, called) for ends, step, called in reports if ends]
        if len(inside) > 1 or any(called or step < max(1, 2 * steps) for step, called in ended):
            return
        other = int(rank == 0)
        raise MismatchError(
            f"rank {rank} called consensus() after {steps} steps, and rank {other} called "
            f"finish() after {reports[other][1]} steps without any consensus(): every rank must "
            f"call consensus(), not only rank {rank}. The other ranks have trained without it "
            "meanwhile"
        )

    def compare_final(self) -> None:
        """Compare the models after the final mean. A collective."""
        models = self._gather("the end of training", [self._checksum()])
        differing = [str(rank) for rank, model in enumerate(models) if model != models[0]]
        if differing and self._worker.team.everyone.rank == 0:
            logger.warning(
                "finish(): the final model of rank %s differs from that of rank 0. A likely reason "
                "is that parameters were changed outside of optimizer.step(), which %s does not "
                "average: change them in an optimizer's step",
                ", ".join(differing),
                self._strategy,
            )

    def warn_if_not_counted(self) -> None:
        """Warn if a replicated model has changed since the start although no step was counted."""
        worker = self._worker
        if not worker.step and self._checksum() != self._start:
            logger.warning(
                "rank %d: 0 steps counted, although the model has changed: Offbeat counts "
                "optimizer.step() of the attached optimizers. Use one instead of changing "
                "parameters by hand",
                worker.rank,
            )

    def _gather(self, what: str, numbers: Sequence[int]) -> list[list[int]]:
        """Return the ``numbers`` of each worker, in rank order. A collective."""
        everyone = self._worker.team.everyone
        own = torch.tensor(numbers, dtype=torch.int64, device=everyone.control_device)
        return [each.tolist() for each in everyone.gather(own, what=what).wait()]
