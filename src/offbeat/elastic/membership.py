"""Membership of real processes: opens each generation, and changes to the next one.

A *generation* is one composition of the workers, its *members*, with its own communicator. The
workers agree on the members with the protocol in ``elastic/agreement.py``. This module then opens
the communicator. If that fails, the workers agree on another generation.
"""

import itertools
import logging
import math
import time
from functools import partial

from offbeat.elastic.agreement import Agreement, Arrival, Decision
from offbeat.elastic.store import StoreLostError
from offbeat.errors import CommunicationError, CommunicationTimeout
from offbeat.transport.communicator import Communicator
from offbeat.transport.key_value_store import KeyValueStore
from offbeat.transport.membership import Generation
from offbeat.transport.single_process import SingleCommunicator
from offbeat.transport.torch_backend.process_groups import GroupFactory, ranks_text
from offbeat.transport.torch_backend.store_access import KeyPoll
from offbeat.transport.torch_backend.threads import close_at_exit
from offbeat.transport.torch_backend.torch_distributed import TorchCommunicator
from offbeat.transport.torch_backend.torch_store import TorchStore

logger = logging.getLogger("offbeat")
_CLOSING_SECONDS = 5.0  # longest wait for the threads of a generation that has ended
_STORE_SECONDS = 0.25  # time between two reads of the store
_HEARTBEAT_SECONDS = 0.2  # time between two checks of the heartbeat connections
# After a membership change of d seconds, no newcomer is admitted for a pause of 4·d seconds, but at
# most ``limits.usual``/4. So even if newcomers vanish again and again, training has 4/5 of the time
# (less if d > ``limits.usual``/16). A failed attempt to open a generation sets the pause, too.
# Otherwise newcomers that come and vanish could prolong one change without end.
_TRAINING_SHARE = 4.0


class UnreachableError(CommunicationError):
    """The members cannot connect to this worker. Joining again would fail, too."""


class StoreMembership:
    """Implements ``Membership`` over the store of the training, for one worker.

    Attributes:
        generation: The current generation. ``enter`` sets it.
    """

    generation: Generation
    _poll: KeyPoll  # finds requests for the next generation

    def __init__(self, agreement: Agreement) -> None:
        self._agreement, self._worker = agreement, agreement.worker
        self._limits = agreement.limits
        self._decision = Decision([], 0)  # on the current generation
        self._member_died = False
        self._last_check = 0.0
        self._pause_end = 0.0  # no newcomer is admitted until then
        self._opened = math.inf  # when the generation was opened; infinity once it trains

    # -- generations -------------------------------------------------------------------------------

    def enter(self, number: int, decision: Decision) -> Generation:
        """Open generation ``number``: connect to its members. A collective of the members.

        Fails if a member does not take part within ``limits.usual``.
        """
        agreement, members = self._agreement, tuple(decision.members)
        agreement.connect_heartbeats(members)
        communicator = self._communicator(number, members)
        try:
            agreement.call(lambda: agreement.store.put("latest", number))
            if unreachable := agreement.connect_heartbeats(members):
                logger.warning(
                    "rank %d has no heartbeat connection to %s: its death is noticed only as "
                    "silence, after %g s",
                    *(self._worker, ranks_text(unreachable), self._limits.usual),
                )
        except BaseException:
            communicator.close()
            raise
        self.generation, self._decision = Generation(number, members, communicator), decision
        self._poll = KeyPoll(
            agreement.store.store, f"generation/{number + 1}/wanted", _STORE_SECONDS
        )
        close_at_exit(self._poll)
        self._member_died, self._last_check = False, time.monotonic()
        self._opened = time.monotonic()
        return self.generation

    def enter_first(self, number: int, decision: Decision) -> Generation:
        """Open generation ``number``, the first of this worker. If that fails, try later ones.

        If generation 0 fails, raises CommunicationError, because the workers gather again.
        """
        try:
            return self.enter(number, decision)
        except CommunicationError as error:
            if number == 0 or isinstance(error, StoreLostError):
                raise
            return self._enter_after(number, decision, step=None)

    def _communicator(self, number: int, members: tuple[int, ...]) -> Communicator:
        agreement = self._agreement
        if len(members) == 1:
            communicator: Communicator = SingleCommunicator(agreement.timeout_seconds)
        else:
            factory = GroupFactory(
                agreement.store.store,
                members.index(self._worker),
                len(members),
                f"generation/{number}/groups",
                itertools.count(),
                opening_seconds=self._limits.usual,
                lost=partial(self._lost_ranks, members, first=number == 0),
                abandoned_key=f"generation/{number + 1}/begun",
            )
            # A worker closes its communicator before it arrives at the next generation. If closing
            # took longer than ``limits.usual``, the others would continue without this worker.
            communicator = TorchCommunicator(
                factory,
                timeout_seconds=agreement.timeout_seconds,
                closing_seconds=min(_CLOSING_SECONDS, self._limits.usual / 4),
            )
        communicator.membership = self
        return communicator

    def change_requested(self) -> bool:
        """Return True if a worker asks to join, or a member has died, left or begun a change.

        Never blocks. If the store does not answer, only deaths are noticed. After a membership
        change, requests are ignored during a pause. If another member begins a change meanwhile,
        the operations of this member fail at once.
        """
        self._opened, now = math.inf, time.monotonic()
        if now - self._last_check > _HEARTBEAT_SECONDS:
            self._last_check = now
            dead = self._agreement.heartbeats.dead()
            self._member_died = self._member_died or not dead.isdisjoint(self.generation.members)
        requested = self._poll.found() and now >= self._pause_end
        return requested or self._member_died

    def next_generation(self, *, step: int) -> Generation:
        """Agree on the next generation and open it; see ``Membership.next_generation``."""
        self._poll.close()
        return self._enter_after(self.generation.number, self._decision, step=step)

    def _enter_after(self, generation: int, before: Decision, *, step: int | None) -> Generation:
        """Agree on the generation after ``generation`` and open it. If that fails, try later ones.

        Args:
            generation: Number of the generation that has ended or could not be opened.
            before: Decision on generation ``generation``.
            step: Number of steps that this worker has taken; None if it was in no generation yet.
        """
        started, limit, unreachable = time.monotonic(), self._limits.usual, list[int]()
        # If no step has followed the opening for so long, some members may not be able to connect.
        # Ping all members: they return pings while they wait for others.
        if self._limits.nearly_reached(started - self._opened):
            unreachable = self._agreement.ping(before.members)
        arrival = Arrival(step is None, unreachable)
        for number in itertools.count(generation + 1):
            earlier = before.members
            admits = time.monotonic() >= self._pause_end
            before = self._agreement.decide(number, before, limit, arrival, admits=admits)
            if self._worker not in before.members:
                raise self._left_behind(number, before, step)
            lost = [w for w in earlier if w not in before.members + before.disconnected]
            if lost and self._worker == before.members[0]:
                logger.warning(
                    "rank %d: generation %d continues without %s, which ended or did not answer "
                    "within %g s",
                    *(self._worker, number, ranks_text(lost), limit),
                )
            if before.disconnected:
                logger.warning(
                    "rank %d: generation %d continues without %s, which cannot connect to all "
                    "of %s",
                    *(self._worker, number),
                    *(ranks_text(before.disconnected), ranks_text(before.members)),
                )
            opening = time.monotonic()
            try:
                return self.enter(number, before)
            except StoreLostError:
                raise
            except CommunicationError as error:
                logger.info(
                    "rank %d: generation %d was not opened: %s", self._worker, number, error
                )
                reason = str(error)
            finally:
                now = time.monotonic()
                # The others wait ``limits.usual`` for a member that ignores requests in its pause.
                pause = min(_TRAINING_SHARE * (now - started), self._limits.usual / 4)
                self._pause_end = now + pause
            longest = self._limits.agreement
            if now - started > longest and not self._agreement.is_decided(number + 1):
                raise CommunicationTimeout(
                    f"rank {self._worker}: agreeing on the next generation failed after "
                    f"{now - started:.1f} s, more than the {longest:g} s that "
                    f"timeout_seconds={self._agreement.timeout_seconds:g} allows: {reason}"
                )
            limit, unreachable = self._limits.usual, []
            if self._limits.nearly_reached(now - opening):
                # Either a member does not answer, so wait less for it at the next generation. Or
                # some members cannot connect to each other, which pings show.
                limit = self._limits.retry
                unreachable = self._agreement.ping(before.members)
            arrival = Arrival(step is None, unreachable)
        raise AssertionError

    def _left_behind(self, number: int, decision: Decision, step: int | None) -> CommunicationError:
        """Return the error of a worker that the ``decision`` on generation ``number`` excludes."""
        kind = CommunicationError
        reason = (
            f"The others wait {self._limits.usual:g} s for a silent worker (timeout_seconds, "
            "but at most 30 s)"
        )
        if self._worker in decision.disconnected:
            kind = UnreachableError
            reason = (
                "It and they cannot all connect to each other, and the largest connected part of "
                "the workers that have the model continues: check the network between them"
            )
        return kind(
            f"rank {self._worker} was left behind at step {step or 0}: "
            f"{ranks_text(decision.members)} are in generation {number}. {reason}. Attach again to "
            "join them"
        )

    def _lost_ranks(self, members: tuple[int, ...], *, first: bool) -> list[int]:
        """Return the ranks of those ``members`` whose processes have ended.

        In the ``first`` generation a member may end before this worker has connected to it. Its
        port then refuses the connection. In later generations such a member counts as unreachable,
        and the next generation excludes it; see ``Agreement.ping``.
        """
        heartbeats = self._agreement.heartbeats
        lost = heartbeats.dead() | (heartbeats.refused if first else set())
        return [rank for rank, worker in enumerate(members) if worker in lost]

    # -- other methods of Membership ---------------------------------------------------------------

    def store(self, name: str) -> KeyValueStore:
        """Open the store ``name`` of the training; see ``Communicator.store``."""
        return TorchStore(self._agreement.store.within(f"stores/{name}").store)

    def leave(self, *, ended: bool) -> None:
        """Announce that this worker leaves permanently; see ``Membership.leave``."""
        self._poll.close()
        self._agreement.leave(self.generation.number, ended=ended)
