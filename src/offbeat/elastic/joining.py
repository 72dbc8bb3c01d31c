"""Joining: a new process becomes a worker of a training that is already running.

It writes its address in the store, and waits until the members of the current view have decided on
a view that contains it; see ``elastic/agreement.py``.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from offbeat.elastic.agreement import SILENCE_SECONDS, Agreement, Decision
from offbeat.elastic.heartbeats import HeartbeatConnections
from offbeat.elastic.membership import StoreMembership
from offbeat.elastic.store import SharedStore
from offbeat.errors import CommunicationError, CommunicationTimeout, EndedError
from offbeat.transport.membership import View

POLL_SECONDS = 0.01, 0.1  # pause between two reads of the store: the first, and the longest
_REFUSED_SECONDS = 5.0  # time after which members whose ports refuse connections count as dead


def new_identity(store: SharedStore, timeout_seconds: float, *, what: str) -> Agreement:
    """Take an unused identity (number of a worker), and ask to join the training.

    ``store`` is that of the training. ``what`` is the beginning of error messages.
    """
    heartbeats = HeartbeatConnections()

    def take() -> int:
        worker = store.count("numbers")
        store.put(f"address/{worker}", heartbeats.address)  # this is the request
        return worker

    try:
        worker = store.call(take, what)
    except BaseException:
        heartbeats.close()
        raise
    return Agreement(
        worker,
        store,
        heartbeats,
        timeout_seconds=timeout_seconds,
        silence_seconds=SILENCE_SECONDS,
    )


class Admission:
    """The request of one worker to join, until it is in a view.

    Args:
        agreement: The protocol, with the identity of this worker.
        replaced: Function that returns True if another training has replaced this one. It accesses
            the store.
    """

    def __init__(self, agreement: Agreement, replaced: Callable[[], bool]) -> None:
        self._agreement, self._replaced = agreement, replaced
        self._what = f"rank {agreement.worker}: joining failed"
        self._gone: set[int] = set()  # workers that have ended or left
        self._unreachable: set[int] = set()
        self._requested = 0.0  # time of the request for the next view

    def wait(self, deadline: float) -> View | None:
        """Request a view change, and open the view that admits this worker. Blocks.

        ``deadline`` is a time of ``time.monotonic``. Returns None if all members have ended or
        another training has replaced this one, so that no one can admit this worker.
        """
        agreement, store = self._agreement, self._agreement.store
        latest = store.call(lambda: store.get("latest"), self._what)
        number, before = -1 if latest is None else latest - 1, Decision([], 0)
        pause, longest = POLL_SECONDS
        while True:
            ended, replaced, decided = self._read(number + 1, before)
            if ended is not None:
                raise EndedError(
                    f"{self._what}: the training at {store.location} has ended. For another one "
                    "use a new store"
                )
            if decided is not None:
                number, before = number + 1, Decision(**decided)
                if agreement.worker in before.members:
                    return StoreMembership(agreement).enter_as_newcomer(number, before)
                if before.considers(agreement.worker):
                    raise UnreachableError(self._what, agreement)
                self._request(number + 1, before)
            elif replaced or (before.members and self._all_gone(before)):
                return None
            elif time.monotonic() > deadline:
                raise CommunicationTimeout(
                    f"{self._what}: the members at {store.location} have not begun another view "
                    f"within timeout_seconds={agreement.timeout_seconds:g}: raise it in "
                    "attach(..., timeout_seconds=...) if their steps may take that long"
                )
            else:
                time.sleep(pause)
                pause = min(2 * pause, longest)

    def _read(self, number: int, before: Decision) -> tuple[Any, bool, Any]:
        """Return whether the training has ended or was replaced, and the decision on a view.

        Reads first who has ended. So if all members of the view ``before`` have ended and there is
        no decision on the next one, ``number``, there never will be.
        """
        store, next_view = self._agreement.store, self._agreement.store.within(f"view/{number}")
        self._gone |= self._agreement.heartbeats.dead()

        def read() -> tuple[Any, bool, Any]:
            self._gone.update(store.present("left/{}", set(before.members) - self._gone))
            return store.get("ended"), self._replaced(), next_view.get("decided")

        return store.call(read, self._what)

    def _request(self, number: int, before: Decision) -> None:
        """Request view ``number``, and watch the members of the view before it."""
        next_view = self._agreement.store.within(f"view/{number}")
        self._agreement.call(partial(next_view.put, "wanted", True))
        self._unreachable = set(self._agreement.connect_heartbeats(before.members))
        self._requested = time.monotonic()

    def _all_gone(self, before: Decision) -> bool:
        """Return True if all members of a view have ended or left, and so cannot admit this worker.

        A member whose process lives answers the request when it next steps. So members that this
        worker cannot reach count as dead if they have not answered for a while.
        """
        agreement, seconds = self._agreement, time.monotonic() - self._requested
        gone = set(self._gone)
        if seconds > _REFUSED_SECONDS:
            gone |= agreement.heartbeats.refused
        if seconds > agreement.silence_seconds:
            gone |= self._unreachable
        return gone.issuperset(before.members)


class UnreachableError(CommunicationError):
    """The members cannot connect to this worker. ``what`` is the beginning of the message."""

    def __init__(self, what: str, agreement: Agreement) -> None:
        super().__init__(
            f"{what}: the members cannot reach this process at {agreement.heartbeats.address}. "
            "Name the network interface that joins you to them in GLOO_SOCKET_IFNAME"
        )
