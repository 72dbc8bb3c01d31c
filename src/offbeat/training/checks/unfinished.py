"""A warning for training that ends without ``finish``."""

import logging
import sys
import weakref

logger = logging.getLogger("offbeat")


class UnfinishedWarning:
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
        """Never warn."""
        self._finalizer.detach()
