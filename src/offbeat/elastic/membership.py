"""The membership of one view in an elastic training of real processes."""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from offbeat.transport.connections import close_at_exit
from offbeat.transport.membership import View
from offbeat.transport.store_access import KeyPoll

if TYPE_CHECKING:
    from offbeat.elastic.agreement import Participant

_STORE_SECONDS = 1.0  # time between two looks at the store
_HEARTBEAT_SECONDS = 0.2  # time between two looks at the heartbeat connections


@dataclass(frozen=True)
class Decision:
    """The members of a view, as written in the store.

    Attributes:
        members: Identities of the members, ascending.
        newcomers: Identities of the members that were in no earlier view.
        asked: Lowest identity that no worker had taken when the decision was made.
    """

    members: list[int]
    newcomers: list[int]
    asked: int


class StoreMembership:
    """The ``Membership`` of one view, through the store of the process group.

    Args:
        participant: This process in the training.
        number: Number of the view.
        decision: Members of the view.

    Attributes:
        view: The view; set once it is open.
    """

    view: View

    def __init__(self, participant: "Participant", number: int, decision: Decision) -> None:
        self._participant, self._number, self._decision = participant, number, decision
        self._others = frozenset(decision.members) - {participant.worker}
        self._poll = KeyPoll(participant.store.store, f"view/{number + 1}/wanted", _STORE_SECONDS)
        self._member_died = False
        self._last_look = time.monotonic()
        close_at_exit(self._poll)

    def change_requested(self) -> bool:
        """See ``Membership.change_requested``. Also True once a member has died.

        If the store is lost, training continues until a member dies.
        """
        self._participant.last_active = now = time.monotonic()
        if now - self._last_look > _HEARTBEAT_SECONDS:
            self._last_look = now
            dead = self._participant.heartbeats.dead()
            self._member_died = self._member_died or bool(dead & self._others)
        return self._poll.found() or self._member_died

    def next_view(self, *, view: int, step: int) -> View:
        """See ``Membership.next_view``."""
        self._poll.close()
        return self._participant.next_view(view, self._decision, step=step)

    def leave(self, *, ended: bool) -> None:
        """See ``Membership.leave``."""
        self._poll.close()
        self._participant.leave(self._number, ended=ended)
