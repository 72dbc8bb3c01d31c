"""The protocol by which real processes agree on the next view, in the store of their process group.

A view change from view v to view v + 1 has four steps:

1. *Arrive.* Each member writes the key ``here`` of view v + 1. It then waits for the members that
   have not arrived, except those whose process has ended, those that have left, and those that were
   silent for too long.
2. *Decide.* When no member is awaited, the lowest arrived member proposes the members of the view:
   the arrived workers and the workers that ask to join. When the time limit for silent members has
   passed, every arrived member proposes. The store accepts the first proposal of a view and no
   other (compare-and-set), so all workers read the same decision, however the network is cut.
3. *Open.* The members in the decision open process groups with each other. A member that is not in
   it was left behind, and raises an error.
4. *Retry.* If step 3 fails, the members of the decision start again with view v + 2.

The whole protocol is in this file, because each step depends on the keys that the others leave.

Keys of a training, below ``offbeat/elastic/<name>``:

    size               number of workers that began together
    keeper             rank of the worker whose process serves the store, if one does
    address/<worker>   address of a worker's heartbeat connections; taken by workers that join
    latest             number of the latest view that was opened
    left/<worker>      exists once a worker has left
    ended              exists once the training has ended
    view/<n>/wanted    exists once a worker requests view n
    view/<n>/begun     exists once a member has arrived: opening view n - 1 is then pointless
    view/<n>/here/<worker>   exists once a worker has arrived; true if it was in no view before
    view/<n>/decided   the decision
    view/<n>/groups/…  addresses of the process groups
"""

import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

from typing_extensions import override

from offbeat.elastic.heartbeats import HeartbeatConnections
from offbeat.elastic.membership import Decision, StoreMembership
from offbeat.elastic.store import SharedStore, StoreLostError
from offbeat.errors import CommunicationError, CommunicationTimeout
from offbeat.transport.communicator import Communicator
from offbeat.transport.membership import EndedError, Membership, View
from offbeat.transport.process_groups import GroupFactory, ranks_text
from offbeat.transport.single_process import SingleCommunicator
from offbeat.transport.torch_distributed import TorchCommunicator

T = TypeVar("T")
logger = logging.getLogger("offbeat")
SILENCE_SECONDS = 30.0
"""Time for which a view change waits for a silent member, if timeout_seconds is not less."""
_RETRY_SILENCE_SECONDS = 3.0  # the same for a member that was silent during the previous opening
_LEAVE_SECONDS = 1.0
_CLOSING_SECONDS = 5.0  # longest wait for the threads of a view that has ended
_POLL_SECONDS = 0.01, 0.1  # time between two looks at the store: at first, and at most


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
        worker: Identity of this worker.
        store: Store of the training.
        heartbeats: Heartbeat connections of this process.
        timeout_seconds: Time limit of one operation.
        silence_seconds: Time for which a view change waits for silent members.

    Attributes:
        last_active: Time (monotonic clock) at which this worker last took part in the training.
    """

    def __init__(
        self,
        worker: int,
        store: SharedStore,
        heartbeats: HeartbeatConnections,
        *,
        timeout_seconds: float,
        silence_seconds: float,
    ) -> None:
        self.worker, self.store, self.heartbeats = worker, store, heartbeats
        self.timeout_seconds = timeout_seconds
        self.silence_seconds = min(silence_seconds, timeout_seconds)
        self.last_active = time.monotonic()

    def enter(self, number: int, decision: Decision, opening_seconds: float) -> View:
        """Open view ``number``.

        Raises:
            CommunicationError: A member did not take part.
        """
        members = tuple(decision.members)
        self._connect_heartbeats(members)
        membership = StoreMembership(self, number, decision)
        communicator = self._communicator(number, members, opening_seconds, membership)
        view = View(number, members, communicator, frozenset(decision.newcomers))
        try:
            self._call(lambda: self.store.put("latest", number))
            if unreachable := self._connect_heartbeats(members):
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
        membership: StoreMembership,
    ) -> Communicator:
        communicator: ElasticCommunicator | ElasticSingle
        if len(members) == 1:
            communicator = ElasticSingle(self.timeout_seconds)
        else:
            factory = GroupFactory(
                self.store.store,
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
            before = self._agree(number, before, patience, newcomer=step is None)
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
            if now - started > longest and not self._is_decided(number + 1):
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

    def _agree(self, number: int, before: Decision, patience: float, *, newcomer: bool) -> Decision:
        """Return the decision of view ``number``, which may exclude this worker.

        Args:
            number: Number of the view.
            before: Decision of the view before it.
            patience: Seconds without an arrival after which silent members are excluded.
            newcomer: True if this worker was in no view before.
        """
        store, started = self.store.within(f"view/{number}"), time.monotonic()
        others, last_arrival = set(before.members) - {self.worker}, started

        def arrive() -> None:
            if store.get("decided") is None:
                store.put(f"here/{self.worker}", newcomer)
                store.put("begun", True)  # for members that still open the view before
                store.put("wanted", True)  # for all other members

        arrived: set[int] = set()
        left: set[int] = set()

        def look() -> tuple[Any, Any]:
            arrived.update(store.present("here/{}", others - arrived))
            left.update(self.store.present("left/{}", others - arrived))
            return store.get("decided"), self.store.get("ended")

        self._call(arrive)
        pause, longest = _POLL_SECONDS
        while True:
            count = len(arrived)
            decided, ended = self._call(look)
            if len(arrived) > count:
                last_arrival = time.monotonic()
            if decided is not None:
                return Decision(**decided)
            if ended is not None:
                raise EndedError(f"rank {self.worker}: the others have ended the training")
            dead = self.heartbeats.dead()
            awaited, present = others - arrived - left - dead, {self.worker, *(arrived - dead)}
            # A minority waits for the whole time-out, so that one badly connected worker does not
            # exclude all others. A majority waits since the last arrival, so that slightly late
            # workers are not excluded.
            majority, now = len(present) >= len(awaited), time.monotonic()
            if majority:
                expired = now - last_arrival > patience
            else:
                expired = now - started > self.timeout_seconds
            if expired or (not awaited and self.worker == min(present)):
                self._propose(number, before, sorted(present))
                continue
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def _is_decided(self, number: int) -> bool:
        """Return True if view ``number`` is decided, or the training has ended.

        A worker that was stopped for a while then learns the outcome, and not that its time is up.
        """
        keys = f"view/{number}/decided", "ended"
        return self._call(lambda: any(self.store.get(key) is not None for key in keys))

    def leave(self, number: int, *, ended: bool) -> None:
        """Announce to the members of view ``number`` that this worker leaves permanently."""

        def announce() -> None:
            self.store.put("ended" if ended else f"left/{self.worker}", True)
            self.store.put(f"view/{number + 1}/wanted", True)

        with contextlib.suppress(StoreLostError):
            self.store.call(announce, "leaving", seconds=_LEAVE_SECONDS)
        if not ended:  # at the end, the others may still be finishing and would see a death
            self.heartbeats.close()

    def _propose(self, number: int, before: Decision, present: list[int]) -> None:
        """Propose a view of the ``present`` workers and the reachable workers that ask to join."""
        addresses = self._call(partial(self._join_requests, before.asked))
        asked = before.asked + len(addresses)
        unreachable = self.heartbeats.connect(addresses)
        joining = sorted(set(addresses) - set(unreachable) - self.heartbeats.dead())

        def propose() -> None:
            store = self.store.within(f"view/{number}")
            newcomers = [worker for worker in present if store.get(f"here/{worker}")]
            members = sorted({*present, *joining})
            decision = Decision(members, sorted([*newcomers, *joining]), asked)
            store.put_if_absent("decided", asdict(decision))

        self._call(propose)

    def _join_requests(self, first: int) -> dict[int, str]:
        """Return the addresses of the workers that have taken an identity from ``first`` on."""
        addresses: dict[int, str] = {}
        while (address := self.store.get(f"address/{first + len(addresses)}")) is not None:
            addresses[first + len(addresses)] = address
        return addresses

    def _connect_heartbeats(self, members: Iterable[int]) -> list[int]:
        """Connect to the members that are not monitored, and return those that are unreachable."""
        others = [w for w in members if w != self.worker and not self.heartbeats.monitors(w)]

        def read() -> dict[int, str]:
            addresses = {worker: self.store.get(f"address/{worker}") for worker in others}
            return {worker: one for worker, one in addresses.items() if one is not None}

        return self.heartbeats.connect(self._call(read)) if others else []

    def _lost_ranks(self, members: tuple[int, ...]) -> list[int]:
        """Return the ranks, in a view with these members, of the dead ones."""
        dead = self.heartbeats.dead()
        return [rank for rank, worker in enumerate(members) if worker in dead]

    def _call(self, function: Callable[[], T]) -> T:
        what = f"rank {self.worker}: agreeing on the next view failed"
        return self.store.call(function, what, seconds=self.timeout_seconds)
