"""Policy for non-finite contributions: raise or warn.

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
