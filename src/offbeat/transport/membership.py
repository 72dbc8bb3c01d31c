"""Who goes on after a loss, and who comes in: the door to whatever agrees on it.

A *view* is one composition of a team. A view change ends everything that is under way in one view
and begins the next one, with a communicator of its own. Losing workers and taking in new ones are
both just that.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from offbeat.errors import CommunicationError
from offbeat.transport.communicator import Communicator


class EndedError(CommunicationError):
    """The other members have ended the training together."""


@dataclass(frozen=True)
class View:
    """One composition of a team, as one of its workers sees it; this one is ``communicator.rank``.

    Attributes:
        number: 0 for the workers that began together, larger for each later view. Numbers may be
            left out, where a view failed before all had come.
        members: Identities by rank, ascending: the ranks of those that began together, and for
            each newcomer a number that nobody had before.
        communicator: Between these members, in this order. It has a ``membership`` again.
        newcomers: Identities of those that are in no earlier view. They have nothing to
            contribute yet.
    """

    number: int
    members: tuple[int, ...]
    communicator: Communicator
    newcomers: frozenset[int] = frozenset()


class Membership(Protocol):
    """What a communicator has that can be replaced by one of other workers; see ``Regroups``.

    The members of a view call ``regroup`` each by itself, as soon as an operation fails or
    ``wanted`` says so. Before that they close the communicator of the view, so that the operations
    of the others fail, too, and these come as well.
    """

    @property
    def view(self) -> View:
        """The view of this communicator: 0, or for a newcomer the one that took it in.

        A newcomer's communicator is made once the members have agreed to take it in.
        """

    def wanted(self) -> bool:
        """Whether somebody asks to join, or a view change has begun elsewhere. Never blocks.

        Asked once a step: it must cost next to nothing.
        """

    def regroup(self, *, view: int, step: int) -> View:
        """Agree on who goes on, and open a communicator between them.

        Blocks at most ``timeout_seconds`` of the communicator, for those that are late. A failure
        of what it returns is the beginning of another view change: it is called again, on the
        membership of the new communicator.

        Args:
            view: Number of the view that ends.
            step: Own steps so far, for messages.

        Raises:
            EndedError: the others have left at the end of training.
            CommunicationError: this worker cannot go on: the others have gone on without it, or
                nobody can be reached. The message says which.
        """

    def leave(self, *, ended: bool) -> None:
        """This worker goes for good: no view change waits for it. Never blocks for long.

        Called just before its communicator is closed for the last time.

        Args:
            ended: All members have come to the end of training: nobody can join any more, and who
                still calls ``regroup`` is told so.
        """


@runtime_checkable
class Regroups(Protocol):
    """A communicator whose workers can agree on who goes on.

    Attributes:
        membership: By which they do; None, or no such attribute: the first failure is the end.
    """

    membership: Membership | None


def membership_of(communicator: Communicator) -> Membership | None:
    """Its membership, if it has one."""
    return communicator.membership if isinstance(communicator, Regroups) else None
