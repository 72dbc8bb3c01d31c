"""The views of an elastic training of real processes: opening them, and asking for the next one.

See ``elastic/agreement.py`` for the protocol.
"""

import itertools
import logging
import time
from functools import partial

from typing_extensions import override

from offbeat.elastic.agreement import Agreement, Decision
from offbeat.elastic.store import StoreLostError
from offbeat.errors import CommunicationError, CommunicationTimeout
from offbeat.transport.communicator import Communicator
from offbeat.transport.membership import Membership, View
from offbeat.transport.single_process import SingleCommunicator
from offbeat.transport.torch_backend.connections import close_at_exit
from offbeat.transport.torch_backend.process_groups import GroupFactory, ranks_text
from offbeat.transport.torch_backend.store_access import KeyPoll
from offbeat.transport.torch_backend.torch_distributed import TorchCommunicator

logger = logging.getLogger("offbeat")
_RETRY_SILENCE_SECONDS = 3.0  # patience with a member that was silent during the previous opening
_CLOSING_SECONDS = 5.0  # longest wait for the threads of a view that has ended
_STORE_SECONDS = 1.0  # time between two looks at the store
_HEARTBEAT_SECONDS = 0.2  # time between two looks at the heartbeat connections


class ElasticCommunicator(TorchCommunicator):
    """A communicator whose workers can agree on the next view."""

    membership: Membership

    @override
    def twin(self) -> Communicator:
        """Return a duplicate, which has no membership: only the original starts a view change."""
        twin = super().twin()
        del twin.__dict__["membership"]
        return twin


class ElasticSingle(SingleCommunicator):
    """The communicator of a view with one member, which other workers can join."""

    membership: Membership


class Participant:
    """This process in one training, through all its views.

    Args:
        agreement: Agreement of this worker with the others.

    Attributes:
        last_active: Time (monotonic clock) at which this worker last took part in the training.
    """

    def __init__(self, agreement: Agreement) -> None:
        self.agreement, self.worker = agreement, agreement.worker
        self.timeout_seconds = agreement.timeout_seconds
        self.silence_seconds = agreement.silence_seconds
        self.last_active = time.monotonic()

    def enter(self, number: int, decision: Decision, opening_seconds: float) -> View:
        """Open view ``number``.

        Raises:
            CommunicationError: A member did not take part.
        """
        agreement, members = self.agreement, tuple(decision.members)
        agreement.connect_heartbeats(members)
        membership = StoreMembership(self, number, decision)
        communicator = self._communicator(number, members, opening_seconds, membership)
        view = View(number, members, communicator, frozenset(decision.newcomers))
        try:
            agreement.call(lambda: agreement.store.put("latest", number))
            if unreachable := agreement.connect_heartbeats(members):
                logger.warning(
                    "rank %d has no heartbeat connection to %s: its death is noticed only as "
                    "silence, after %g s",
                    *(self.worker, ranks_text(unreachable), self.silence_seconds),
                )
        except BaseException:
            communicator.close()
            raise
        membership.view = view
        self.last_active = time.monotonic()
        return view

    def enter_as_newcomer(self, number: int, decision: Decision) -> View:
        """Open view ``number``, which admits this worker, or the first later one that opens."""
        try:
            return self.enter(number, decision, self.silence_seconds)
        except StoreLostError:
            raise
        except CommunicationError:
            return self.next_view(number, decision, step=None)

    def _communicator(
        self,
        number: int,
        members: tuple[int, ...],
        opening_seconds: float,
        membership: "StoreMembership",
    ) -> Communicator:
        communicator: ElasticCommunicator | ElasticSingle
        if len(members) == 1:
            communicator = ElasticSingle(self.timeout_seconds)
        else:
            factory = GroupFactory(
                self.agreement.store.store,
                members.index(self.worker),
                len(members),
                f"view/{number}/groups",
                itertools.count(),
                opening_seconds=opening_seconds,
                lost=partial(self._lost_ranks, members),
                abandoned_key=f"view/{number + 1}/begun",
            )
            # The communicator is closed before this worker arrives at the next view. If closing
            # waited for a stuck thread longer than the others wait, they would leave it behind.
            communicator = ElasticCommunicator(
                factory,
                timeout_seconds=self.timeout_seconds,
                closing_seconds=min(_CLOSING_SECONDS, self.silence_seconds / 4),
            )
        communicator.membership = membership
        return communicator

    def next_view(self, view: int, before: Decision, *, step: int | None) -> View:
        """Agree on and open the view after ``view``, or the first later one that opens.

        Args:
            view: Number of the view that has ended or could not be opened.
            before: Its members.
            step: Steps of this worker so far; None if it was in no view.

        Raises:
            EndedError: The training has ended.
            CommunicationError: This worker cannot continue.
        """
        started, patience = time.monotonic(), self.silence_seconds
        for number in itertools.count(view + 1):
            before = self.agreement.decide(number, before, patience, newcomer=step is None)
            if self.worker not in before.members:
                silent_for = time.monotonic() - self.last_active
                raise CommunicationError(
                    f"rank {self.worker} was left behind at step {step or 0}: "
                    f"{ranks_text(before.members)} are in view {number}. It did not take part for "
                    f"{silent_for:.1f} s, and the others wait {self.silence_seconds:g} s for a "
                    "silent worker (timeout_seconds, but at most 30 s). Attach again as a "
                    "newcomer, with group=offbeat.join(...)"
                )
            opening = time.monotonic()
            try:
                return self.enter(number, before, self.silence_seconds)
            except StoreLostError:
                raise
            except CommunicationError as error:
                logger.info("rank %d: view %d was not opened: %s", self.worker, number, error)
                now, reason = time.monotonic(), str(error)
            # A member that falls silent after it has arrived costs three times the limit: if it was
            # to propose, until the others propose; then it is in the decision, so until the opening
            # fails; and then until the next agreement excludes it.
            longest = max(self.timeout_seconds, 3 * self.silence_seconds) + self.silence_seconds
            if now - started > longest and not self.agreement.is_decided(number + 1):
                raise CommunicationTimeout(
                    f"rank {self.worker}: agreeing on the next view failed after "
                    f"{now - started:.1f} s, longer than "
                    f"timeout_seconds={self.timeout_seconds:g} allows: {reason}"
                )
            # A member that was silent during the whole opening has used up its time.
            was_silent = now - opening > 0.9 * self.silence_seconds
            patience = self.silence_seconds
            if was_silent:
                patience = min(_RETRY_SILENCE_SECONDS, self.silence_seconds)
        raise AssertionError

    def _lost_ranks(self, members: tuple[int, ...]) -> list[int]:
        """Return the ranks, in a view with these members, of the dead ones."""
        dead = self.agreement.heartbeats.dead()
        return [rank for rank, worker in enumerate(members) if worker in dead]


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

    def __init__(self, participant: Participant, number: int, decision: Decision) -> None:
        self._participant, self._number, self._decision = participant, number, decision
        self._others = frozenset(decision.members) - {participant.worker}
        self._poll = KeyPoll(
            participant.agreement.store.store, f"view/{number + 1}/wanted", _STORE_SECONDS
        )
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
            dead = self._participant.agreement.heartbeats.dead()
            self._member_died = self._member_died or bool(dead & self._others)
        return self._poll.found() or self._member_died

    def next_view(self, *, view: int, step: int) -> View:
        """See ``Membership.next_view``."""
        self._poll.close()
        return self._participant.next_view(view, self._decision, step=step)

    def leave(self, *, ended: bool) -> None:
        """See ``Membership.leave``."""
        self._poll.close()
        self._participant.agreement.leave(self._number, ended=ended)
