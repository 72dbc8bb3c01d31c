"""The membership interface: how workers agree on who takes part after a loss or a join.

One composition of the workers is a *generation*. When a worker is lost or wants to join, a
*membership change* ends the current generation with all its operations. The next generation starts
with a new communicator.
"""

from dataclasses import dataclass
from typing import Protocol

from offbeat.errors import OffbeatError
from offbeat.transport.communicator import Communicator


class ModelLostError(OffbeatError):
    """No worker of a generation has the model, because all of them have joined just now."""


@dataclass(frozen=True)
class Generation:
    """One composition of the workers. The rank of this worker is ``communicator.rank``.

    Attributes:
        number: Number of the generation: 0 for the first, and larger for each later one.
        members: Identity of each worker, by rank; ascending. The identity of a worker is its rank
            in generation 0, or a new number if it joined later.
        communicator: Communicator between these members.
    """

    number: int
    members: tuple[int, ...]
    communicator: Communicator


class Membership(Protocol):
    """Interface through which a worker agrees with the other members on the next generation.

    Any member can begin a membership change: if an operation fails or ``change_requested`` returns
    True, it closes the communicator of the generation and calls ``next_generation``. The closed
    connections make operations of the other members fail, so these members do the same.
    """

    @property
    def generation(self) -> Generation:
        """The current generation."""

    def change_requested(self) -> bool:
        """Return True if a worker asks to join, or another member has left or begun a change.

        The answer may be late. Never blocks, and is fast enough to call in every step.
        """

    def next_generation(self, *, step: int) -> Generation:
        """Agree on the next generation, and open a communicator between its members. Blocks.

        Members that do not call this method in time are excluded from the next generation. It may
        take several times the time limit of an operation, because each of its waits has that limit.

        Args:
            step: Steps that this worker has taken, for error messages.

        Raises:
            EndedError: The other members have finished the training.
            CommunicationError: The others continue without this worker, or it cannot reach them.
        """

    def leave(self, *, ended: bool) -> None:
        """Announce that this worker leaves permanently, so that no membership change waits for it.

        The worker closes its communicator afterwards. May block for about a second.

        Args:
            ended: True if all members have reached the end of training. From then on no worker can
                join, and ``next_generation`` raises EndedError.
        """
