"""Policy for non-finite contributions: raise, warn, or exclude the worker from the mean."""

import logging

from offbeat.averaging.votes import Sums
from offbeat.averaging.worker import NonFinite
from offbeat.errors import OffbeatError

logger = logging.getLogger("offbeat")


class NonFiniteCheck:
    """Applies the policy to the tally of each round, the same way on all workers.

    It holds neither the worker nor the flow, because a round in progress holds it.

    Args:
        rank: Rank of this worker.
        policy: The argument ``non_finite`` of ``attach``.
        can_exclude: True if the policy "exclude" is possible.

    Attributes:
        excluded: Number of contributions that were excluded so far, over all workers; those found
            after a vote count on their own worker only.
    """

    def __init__(self, rank: int, policy: NonFinite, *, can_exclude: bool = True) -> None:
        self._rank, self._policy, self._logged = rank, policy, False
        self._can_exclude = can_exclude
        self.excluded = 0

    def __call__(self, sums: Sums, step: int) -> Sums:
        """Return the tally if training may continue.

        Args:
            sums: The tally of a round.
            step: Local steps so far.

        Raises:
            OffbeatError: a worker would contribute non-finite values and the policy is "raise"; or
                it is "exclude" and no worker is left that would contribute.
        """
        if not sums.non_finite:
            return sums
        name = f"{sums.non_finite} workers"
        if sums.non_finite_rank is not None:
            name = f"rank {sums.non_finite_rank}"
        found = f"{name} would contribute NaN or infinity to the mean at step {step}"
        if self._policy == "raise":
            advice = '. With non_finite="exclude" training continues without such a contribution'
            raise OffbeatError(
                f'{found}; no other model has received it (non_finite="raise")'
                f"{advice if self._can_exclude else ''}"
            )
        if self._policy == "exclude":
            self.excluded += sums.non_finite
            if not sums.weight:
                raise OffbeatError(
                    f'{found}, and no other worker contributes (non_finite="exclude")'
                )
        if not self._logged:
            self._logged = True
            logger.warning("rank %d: %s: %s", self._rank, found, self._consequence())
        return sums

    def exclude_late(self, step: int) -> None:
        """Count a contribution of this worker that was found non-finite after its vote."""
        self.excluded += 1
        if not self._logged:
            self._logged = True
            found = f"this worker would contribute NaN or infinity to the mean at step {step}"
            logger.warning("rank %d: %s: %s", self._rank, found, self._consequence())

    def _consequence(self) -> str:
        if self._policy == "exclude":
            return "excluded; later ones are counted in Stats.details as non_finite_excluded"
        choices = '"raise" or "exclude"' if self._can_exclude else '"raise"'
        return f"all workers receive it; non_finite={choices} prevents that"
