"""When workers give up a member that does not answer. All time limits of that decision are here.

A member whose process has ended has closed its heartbeat connections, and no worker waits for it.
For the other members that a worker waits for at the next generation (``elastic/agreement.py``):

- A majority gives up a member that has not arrived ``SilenceLimits.usual`` seconds after the newest
  arrival. So it does not exclude slightly late workers.
- A member that has not answered during the opening of the previous generation either has only
  ``SilenceLimits.retry`` seconds.
- A majority does not wait for machines that have lost their power or their network. The kernels of
  these machines do not answer the probes of the heartbeat connections for about 7/8 of the time
  limit of an operation (``elastic/heartbeats.py``). If an arrived worker was *silent* in this
  sense, too, it was the network of this worker.
- A minority waits for the time limit of an operation, so that a badly connected worker does not
  exclude all others.
"""

from collections.abc import Set
from dataclasses import dataclass, field

LONGEST_SECONDS = 30.0
"""Largest value of ``SilenceLimits.usual``."""
REFUSED_SECONDS = 5.0
"""Time after which members whose ports refuse connections count as dead for a newcomer."""
_RETRY_SECONDS = 3.0


@dataclass
class SilenceLimits:
    """The time limits, in seconds.

    Args:
        timeout_seconds: Time limit of an operation.

    Attributes:
        usual: Longest time that arrived members wait for the others after the newest arrival.
    """

    timeout_seconds: float
    usual: float = field(init=False)

    def __post_init__(self) -> None:
        self.usual = min(LONGEST_SECONDS, self.timeout_seconds)

    @property
    def retry(self) -> float:
        """``usual`` for members that did not answer during the last opening of a generation."""
        return min(_RETRY_SECONDS, self.usual)

    @property
    def agreement(self) -> float:
        """Longest time for agreeing on a generation that can be opened.

        A member that stops answering after it has arrived may cost ``usual`` three times: the
        others wait for its proposal, then for the opening of the generation to fail, and then for
        its arrival at the next generation.
        """
        return max(self.timeout_seconds, 3 * self.usual) + self.usual

    def nearly_reached(self, seconds: float) -> bool:
        """Return True if a wait of ``seconds`` has probably reached the limit ``usual``."""
        return seconds > 0.9 * self.usual

    def passed(
        self,
        present: Set[int],
        awaited: Set[int],
        waited: float,
        since_arrival: float,
        limit: float,
    ) -> bool:
        """Return True if the ``present`` members no longer wait for the ``awaited`` ones.

        Args:
            present: The arrived members and this worker.
            awaited: The members that have not arrived.
            waited: Time since this worker arrived.
            since_arrival: Time since the newest arrival.
            limit: ``usual`` or ``retry``.
        """
        if len(present) >= len(awaited):
            return since_arrival > limit
        return waited > self.timeout_seconds


def machines_are_down(present: Set[int], awaited: Set[int], silent: Set[int]) -> bool:
    """Return True if a majority waits only for members whose machines or networks are down.

    Args:
        present: The arrived members and this worker.
        awaited: The members that have not arrived.
        silent: Workers whose kernels do not answer.
    """
    majority = len(present) >= len(awaited)
    return majority and awaited <= silent and silent.isdisjoint(present)
