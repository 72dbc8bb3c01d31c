"""The membership interface: how workers agree on who takes part after a loss or a join.

One composition of the workers is a *view*. A view change ends everything that is in flight in one
view and starts the next view with a new communicator. Losing workers and admitting new ones are
both view changes.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from offbeat.errors import CommunicationError
from offbeat.transport.communicator import Communicator


class EndedError(CommunicationError):
    """The other members have finished the training."""


@dataclass(frozen=True)
class View:
    """One composition of the workers. The rank of this worker is ``communicator.rank``.

    Attributes:
        number: 0 for the first view, larger for each later one. A number is skipped if its view
            failed before all members had entered it.
        members: Identities by rank, ascending. An identity is the worker's rank in view 0, or a
            new number for a worker that joined later.
        communicator: Communicator between these members in this order. It has a ``membership``.
        newcomers: Identities of the members that were in no earlier view. They have no state to
            contribute yet.
    """

    number: int
    members: tuple[int, ...]
    communicator: Communicator
    newcomers: frozenset[int] = frozenset()


class Membership(Protocol):
    """The membership of one view.

    Each member calls ``next_view`` by itself, as soon as an operation fails or
    ``change_requested`` returns True. Before that it closes the communicator of the view, so that
    the operations of the other members fail and they call ``next_view``, too.
    """

    @property
    def view(self) -> View:
        """The view of this communicator: 0, or for a newcomer the view that admitted it.

        A newcomer receives its communicator once the members have admitted it.
        """

    def change_requested(self) -> bool:
        """Return True if a worker asks to join or another member has started a view change.

        Never blocks. Called once per step, so it must cost next to nothing.
        """

    def next_view(self, *, view: int, step: int) -> View:
        """Agree on the next view, and open a communicator between its members.

        Blocks for at most ``timeout_seconds`` of the communicator while members are late. A failure
        of the new communicator starts another view change, with its own membership.

        Args:
            view: Number of the view that ends.
            step: Steps of this worker so far, for messages.

        Raises:
            EndedError: The other members have finished the training.
            CommunicationError: This worker cannot continue: the others continue without it, or it
                cannot reach them. The message tells which.
        """

    def leave(self, *, ended: bool) -> None:
        """Leave permanently, so that no view change waits for this worker. Does not block for long.

        Called just before the worker closes its communicator for the last time.

        Args:
            ended: True if all members have reached the end of training. No worker can join from
                then on, and ``next_view`` raises EndedError.
        """


@runtime_checkable
class HasMembership(Protocol):
    """A communicator whose workers can agree on the next view.

    Attributes:
        membership: Membership of its view; None if the first failure ends the training.
    """

    membership: Membership | None


def membership_of(communicator: Communicator) -> Membership | None:
    """Return the membership of a communicator, or None if it has none."""
    return communicator.membership if isinstance(communicator, HasMembership) else None
