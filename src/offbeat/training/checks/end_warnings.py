"""Warnings about the end of training: without ``finish``, or after steps that were not counted."""

import logging
import sys
import weakref

from offbeat.averaging import Worker

logger = logging.getLogger("offbeat")


class EndWarnings:
    """Logs a warning when ``owner`` is freed, or Python exits, after steps and without ``cancel``.

    Silent if an exception ends the program: then it is the reason.

    Attributes:
        steps: Number of steps so far.
    """

    def __init__(self, owner: object, rank: int) -> None:
        self.steps, self._rank = 0, rank
        self._finalizer = weakref.finalize(owner, self._warn)

    def _warn(self) -> None:
        if self.steps and getattr(sys, "last_value", None) is None:
            logger.warning(
                "rank %d has taken %d steps and has called neither finish() nor detach(): its "
                "model is the local one, not the mean of the workers. Call finish() on every rank "
                "after the last step",
                self._rank,
                self.steps,
            )

    def cancel(self) -> None:
        """Do not warn when ``owner`` is freed."""
        self._finalizer.detach()

    def warn_if_not_counted(self, worker: Worker) -> None:
        """Warn if ``steps`` is 0 at the end, although the script has trained the model."""
        trained = worker.touched or any(p.grad is not None for _, p in worker.replica.parameters)
        if trained and not self.steps:
            logger.warning(
                "rank %d: 0 steps counted, although the model or its gradients have changed: "
                "Offbeat counts optimizer.step() of the attached optimizers. Use one instead of "
                "changing parameters by hand",
                worker.rank,
            )
