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

Steps 1 and 2 are in this file, steps 3 and 4 in ``elastic/membership.py``.

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
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeVar

from offbeat.elastic.heartbeats import HeartbeatConnections
from offbeat.elastic.store import SharedStore, StoreLostError
from offbeat.transport.membership import EndedError

T = TypeVar("T")
SILENCE_SECONDS = 30.0
"""Time for which a view change waits for a silent member, if timeout_seconds is not less."""
_LEAVE_SECONDS = 1.0
_POLL_SECONDS = 0.01, 0.1  # time between two looks at the store: at first, and at most


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


class Agreement:
    """The agreement protocol, as run by one worker through all views of a training.

    Args:
        worker: Identity of this worker.
        store: Store of the training.
        heartbeats: Heartbeat connections of this process.
        timeout_seconds: Time limit of one operation.
        silence_seconds: Time for which a view change waits for silent members.
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

    def decide(self, number: int, before: Decision, patience: float, *, newcomer: bool) -> Decision:
        """Arrive at view ``number``, and return its decision, which may exclude this worker.

        Args:
            number: Number of the view.
            before: Decision of the view before it.
            patience: Seconds without an arrival after which silent members are excluded.
            newcomer: True if this worker was in no view before.

        Raises:
            EndedError: The training has ended.
            StoreLostError: The store does not answer.
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

        self.call(arrive)
        pause, longest = _POLL_SECONDS
        while True:
            count = len(arrived)
            decided, ended = self.call(look)
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

    def is_decided(self, number: int) -> bool:
        """Return True if view ``number`` is decided, or the training has ended.

        A worker that was stopped for a while then learns the outcome, and not that its time is up.
        """
        keys = f"view/{number}/decided", "ended"
        return self.call(lambda: any(self.store.get(key) is not None for key in keys))

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
        addresses = self.call(partial(self._join_requests, before.asked))
        asked = before.asked + len(addresses)
        unreachable = self.heartbeats.connect(addresses)
        joining = sorted(set(addresses) - set(unreachable) - self.heartbeats.dead())

        def propose() -> None:
            store = self.store.within(f"view/{number}")
            newcomers = [worker for worker in present if store.get(f"here/{worker}")]
            members = sorted({*present, *joining})
            decision = Decision(members, sorted([*newcomers, *joining]), asked)
            store.put_if_absent("decided", asdict(decision))

        self.call(propose)

    def _join_requests(self, first: int) -> dict[int, str]:
        """Return the addresses of the workers that have taken an identity from ``first`` on."""
        addresses: dict[int, str] = {}
        while (address := self.store.get(f"address/{first + len(addresses)}")) is not None:
            addresses[first + len(addresses)] = address
        return addresses

    def connect_heartbeats(self, members: Iterable[int]) -> list[int]:
        """Connect to the members that are not monitored, and return those that are unreachable."""
        others = [w for w in members if w != self.worker and not self.heartbeats.monitors(w)]

        def read() -> dict[int, str]:
            addresses = {worker: self.store.get(f"address/{worker}") for worker in others}
            return {worker: one for worker, one in addresses.items() if one is not None}

        return self.heartbeats.connect(self.call(read)) if others else []

    def call(self, function: Callable[[], T]) -> T:
        """Return the result of ``function``, which accesses the store."""
        what = f"rank {self.worker}: agreeing on the next view failed"
        return self.store.call(function, what, seconds=self.timeout_seconds)
