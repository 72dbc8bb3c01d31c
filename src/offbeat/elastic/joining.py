"""Joining: a new process becomes a worker of a training that is already running.

It has written its address in the store, and waits until the members of the current view have
decided on a view that contains it; see ``elastic/agreement.py``.
"""

import time
from collections.abc import Callable
from typing import Any

from offbeat.elastic.agreement import Agreement, Decision, polls
from offbeat.elastic.membership import StoreMembership
from offbeat.errors import CommunicationError, CommunicationTimeout, EndedError
from offbeat.transport.membership import View

_REFUSED_SECONDS = 5.0  # time after which members whose ports refuse connections count as dead


class UnreachableError(CommunicationError):
    """The members cannot connect to this worker."""


def join(agreement: Agreement, replaced: Callable[[], bool], deadline: float) -> View | None:
    """Request a view change, and open the view that admits this worker. Blocks.

    Args:
        agreement: The protocol, with the identity of this worker.
        replaced: Function that returns True if another training has replaced this one. It accesses
            the store.
        deadline: Time of ``time.monotonic``.

    Returns:
        The view. None if all members have ended or another training has replaced this one, so that
        no one can admit this worker.
    """
    store, heartbeats, worker = agreement.store, agreement.heartbeats, agreement.worker
    what = f"rank {worker}: joining failed"
    latest = agreement.call(lambda: store.get("latest"))
    number, before = -1 if latest is None else latest - 1, Decision([], 0)
    gone: set[int] = set()  # workers that have ended or left
    unreachable: set[int] = set()
    requested = 0.0  # time of the request for the next view

    def read() -> tuple[Any, bool, Any]:
        gone.update(store.present("left/{}", set(before.members) - gone))
        return store.get("ended"), replaced(), store.get(f"view/{number + 1}/decided")

    for _ in polls():
        # First who has ended. So if all members of the view ``before`` have ended and there is no
        # decision on the next one, there never will be.
        gone |= heartbeats.dead()
        ended, is_replaced, decided = agreement.call(read)
        if ended is not None:
            raise EndedError(
                f"{what}: the training at {store.location} has ended. For another one use a new "
                "store"
            )
        if decided is not None:
            number, before = number + 1, Decision(**decided)
            if worker in before.members:
                return StoreMembership(agreement).enter_as_newcomer(number, before)
            if before.considers(worker):
                raise UnreachableError(
                    f"{what}: the members cannot reach this process at {heartbeats.address}. Name "
                    "the network interface that joins you to them in GLOO_SOCKET_IFNAME"
                )
            agreement.request(number + 1)
            unreachable = set(agreement.connect_heartbeats(before.members))
            requested = time.monotonic()
            continue
        # A member whose process lives answers the request when it next steps. So members that this
        # worker cannot reach count as dead if they have not answered for a while.
        waited, lost = time.monotonic() - requested, set(gone)
        if waited > _REFUSED_SECONDS:
            lost |= heartbeats.refused
        if waited > agreement.silence_seconds:
            lost |= unreachable
        if is_replaced or (before.members and lost.issuperset(before.members)):
            return None
        if time.monotonic() > deadline:
            raise CommunicationTimeout(
                f"{what}: the members at {store.location} have not begun another view within "
                f"timeout_seconds={agreement.timeout_seconds:g}: raise it in "
                "attach(..., timeout_seconds=...) if their steps may take that long"
            )
    raise AssertionError
