"""Policy for non-finite contributions: raise, warn, or exclude the worker from the mean.

The vote of a worker in a round (``rounds.py``) reports whether its contribution contains NaN or
infinity.
"""

import logging

from offbeat.averaging.votes import Sums
from offbeat.averaging.worker import NonFinite
from offbeat.errors import OffbeatError

logger = logging.getLogger("offbeat")


class NonFiniteCheck:
    """Applies the policy to the tally of each round, in the same way on all workers.

    Args:
        rank: Rank of this worker.
        policy: Argument ``non_finite`` of ``attach``.
        can_exclude: True if the strategy supports the policy "exclude". Messages then mention it.

    Attributes:
        excluded: Number of contributions that were excluded: of all workers, if a vote has reported
            them; only of this worker, if they were found after the vote.
    """

    # Holds neither the flow nor the worker, because a round in progress holds this object and must
    # not keep them alive.

    def __init__(self, rank: int, policy: NonFinite, *, can_exclude: bool = True) -> None:
        self._rank, self._policy, self._logged = rank, policy, False
        self._can_exclude = can_exclude
        self.excluded = 0

    def __call__(self, sums: Sums, step: int) -> Sums:
        """Apply the policy to ``sums``, the tally of a round, and return ``sums`` unchanged.

        With "warn" and "exclude" only the first case is logged. ``step`` is used in messages.

        Raises:
            OffbeatError: the policy is "raise", and a worker reports non-finite values. Or the
                policy is "exclude", and no worker with finite values contributes.
        """
        if not sums.non_finite:
            return sums
        name = f"{sums.non_finite} workers"
        if sums.non_finite_rank is not None:
            name = f"rank {sums.non_finite_rank}"
        message = _message(name, step)
        if self._policy == "raise":
            advice = '. With non_finite="exclude" training continues without such a contribution'
            raise OffbeatError(
                f'{message}; no other model has received it (non_finite="raise")'
                f"{advice if self._can_exclude else ''}"
            )
        if self._policy == "exclude":
            self.excluded += sums.non_finite
            if not sums.weight:
                raise OffbeatError(
                    f'{message}, and no other worker contributes (non_finite="exclude")'
                )
        self._warn_once(message)
        return sums

    def exclude_late(self, step: int) -> None:
        """Count and log a non-finite contribution that this worker's vote has not reported."""
        self.excluded += 1
        self._warn_once(_message("this worker", step))

    def report_excluded(self) -> None:
        """Log the number of exclusions at the end of training, if there were any."""
        if self.excluded:
            logger.warning(
                "rank %d: %d contributions with NaN or infinity were excluded from the means of "
                "this training",
                self._rank,
                self.excluded,
            )

    def _warn_once(self, message: str) -> None:
        if self._logged:
            return
        self._logged = True
        choices = '"raise" or "exclude"' if self._can_exclude else '"raise"'
        consequence = f"all workers receive it; non_finite={choices} prevents that"
        if self._policy == "exclude":
            consequence = "excluded; later ones are counted in Stats.details as non_finite_excluded"
        logger.warning("rank %d: %s: %s", self._rank, message, consequence)


def _message(name: str, step: int) -> str:
    return f"{name} would contribute NaN or infinity to the mean at step {step}"
