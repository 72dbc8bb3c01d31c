"""The protocol by which real processes agree on the next generation, through a shared store.

A *generation* is one composition of the workers, its *members*. Each worker takes a number from a
counter in the store, its *identity*. The store is the one at which the workers gather
(``elastic/gathering.py``).

When a member is lost or a worker asks to join, generation v + 1 replaces generation v in four
steps:

1. *Arrive.* Each member of generation v writes the key ``generation/<v+1>/here/<worker>``. Then it
   waits for the other members, except those whose process has ended and those that have left.
2. *Decide.* When all of these have arrived, the arrived member with the lowest identity proposes
   the members of generation v + 1: the arrived members and the workers that ask to join. Arrived
   members that cannot connect to each other are not both proposed; see ``connected``. If some
   members do not arrive in time, every arrived member proposes the generation without them. The
   store accepts only the first proposal of a generation (compare-and-set). So all workers read the
   same decision, even if the network is divided.
3. *Open.* The members of generation v + 1 open process groups with each other. A worker that the
   decision excludes raises an error.
4. *Retry.* If step 3 fails, the members of generation v + 1 start again with generation v + 2. If
   it took nearly its time limit, or no step was taken for as long after it, each member first
   pings the other members and reports those that do not answer.

Steps 1 and 2 are in this file, steps 3 and 4 in ``elastic/membership.py``.

The key ``offbeat/elastic`` contains the key prefix of the training that began last. The keys of one
training begin with this prefix, ``offbeat/elastic/<name>``:

    numbers            counter of the identities that workers have taken
    address/<worker>   address at which the worker accepts heartbeat connections
    latest             number of the latest generation that was opened
    left/<worker>      exists once the worker has left before the end
    ended              exists once the training has ended
    generation/<n>/wanted    exists once a worker requests generation n
    generation/<n>/begun     exists once a member has arrived; opening generation n - 1 is given up
    generation/<n>/here/<worker>   exists once the worker has arrived: the fields of ``Arrival``
    generation/<n>/decided   the decision
    generation/<n>/groups/…  addresses of the process groups
    stores/<name>/…    keys of a separate store for components such as ``LeasedSampler``
"""

import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from offbeat.elastic import reports
from offbeat.elastic.heartbeats import HeartbeatConnections
from offbeat.elastic.silence import SilenceLimits, machines_are_down
from offbeat.elastic.store import SharedStore, StoreLostError
from offbeat.errors import EndedError
from offbeat.transport.torch_backend.store_access import polls

T = TypeVar("T")
_LEAVE_SECONDS = 1.0  # time limit of leave()
POLL_SECONDS = 0.01, 0.1
"""Pauses between two reads of the store: the first, and the longest."""


@dataclass(frozen=True)
class Decision:
    """The composition of a generation, as written in the store.

    Attributes:
        members: Identities of the members, ascending.
        next_identity: Lowest identity that was unused when the decision was made. The decision
            admits or refuses every worker with a smaller identity, except the ``unannounced``.
        disconnected: Identities of the arrived members that the generation excludes, because they
            cannot connect to all of its members.
        unannounced: Identities below ``next_identity`` without an address. Their workers have taken
            them, and have not written their addresses yet. The next decision considers them.
    """

    members: list[int]
    next_identity: int
    disconnected: list[int] = field(default_factory=list)
    unannounced: list[int] = field(default_factory=list)

    def considers(self, worker: int) -> bool:
        """Return True if the decision admits or refuses the worker with this identity."""
        return worker < self.next_identity and worker not in self.unannounced


@dataclass(frozen=True)
class Arrival:
    """What a worker writes in the store when it arrives at a generation.

    Attributes:
        newcomer: True if the worker was in no earlier generation.
        unreachable: Identities of the workers to which this worker cannot connect.
    """

    newcomer: bool
    unreachable: list[int]


def connected(
    unreachable: Mapping[int, Iterable[int]], newcomers: Collection[int] = ()
) -> list[int]:
    """Return workers that can all connect to each other, ascending.

    Workers are added one by one, each if it can connect to all workers that were added before. The
    workers with the most connections come first, and of these the lowest identity. So if the
    network is divided into separate sides, the result is the largest side, or of equally large
    sides the one with the lowest identity.

    Newcomers do not have the model yet, so they cannot exclude a worker that has it: the rule
    applies first to the other workers, and then to the newcomers that can connect to those chosen.

    Args:
        unreachable: For each worker, the workers to which it cannot connect. A connection that one
            of its two workers cannot open counts as missing.
        newcomers: Workers that were in no earlier generation.
    """
    workers = set(unreachable)
    missing: dict[int, set[int]] = {worker: set() for worker in workers}
    for worker, others in unreachable.items():
        for other in workers.intersection(others):
            missing[worker].add(other)
            missing[other].add(worker)
    chosen: set[int] = set()
    for group in workers.difference(newcomers), workers.intersection(newcomers):
        able = {worker for worker in group if not missing[worker] & chosen}
        for worker in sorted(able, key=lambda worker: (len(missing[worker] & able), worker)):
            if not missing[worker] & chosen:
                chosen.add(worker)
    return sorted(chosen)


class Agreement:
    """The agreement protocol, as run by one worker in all generations of a training.

    Args:
        store: Store of the training. This worker takes an unused identity there, and asks to join
            the training by writing its address.
        timeout_seconds: Time limit of one operation.

    Attributes:
        worker: Identity of this worker.
        heartbeats: Tells which members' processes have ended.
        limits: Times after which a member that does not answer is given up.
    """

    def __init__(self, store: SharedStore, timeout_seconds: float) -> None:
        self.store, self.timeout_seconds = store, timeout_seconds
        self.limits = SilenceLimits(timeout_seconds)
        self.heartbeats = HeartbeatConnections(timeout_seconds)

        def take() -> int:
            worker = store.next_number("numbers")
            store.put(f"address/{worker}", self.heartbeats.address)
            return worker

        try:
            self.worker = store.call(take, "gathering failed")
        except BaseException:
            self.heartbeats.close()
            raise

    def decide(
        self, number: int, before: Decision, limit: float, arrival: Arrival, *, admits: bool = True
    ) -> Decision:
        """Arrive at generation ``number`` and return the decision on it. Blocks.

        The decision may exclude this worker.

        Args:
            number: Number of the generation.
            before: Decision on the previous generation.
            limit: Time after which silent members are given up; see ``SilenceLimits.passed``.
            arrival: Tells the others about this worker.
            admits: False if a proposal of this worker leaves newcomers to a later decision.
        """
        store, started = self.store.within(f"generation/{number}"), time.monotonic()
        others, last_arrival = set(before.members) - {self.worker}, started

        def arrive() -> None:
            if store.get("decided") is None:
                store.put(f"here/{self.worker}", asdict(arrival))
                store.put("begun", True)  # read by members that still open the previous generation
                store.put("wanted", True)  # read by members that train

        arrived: set[int] = set()
        left: set[int] = set()

        def read() -> tuple[Any, Any]:
            arrived.update(store.present("here/{}", others - arrived))
            left.update(self.store.present("left/{}", others - arrived))
            return store.get("decided"), self.store.get("ended")

        self.call(arrive)
        for _ in polls(*POLL_SECONDS):
            count = len(arrived)
            decided, ended = self.call(read)
            if len(arrived) > count:
                last_arrival = time.monotonic()
            if decided is not None:
                return Decision(**decided)
            if ended is not None:
                raise EndedError(f"rank {self.worker}: the others have ended the training")
            dead = self.heartbeats.dead()
            awaited, present = others - arrived - left - dead, {self.worker, *(arrived - dead)}
            now = time.monotonic()
            expired = self.limits.passed(present, awaited, now - started, now - last_arrival, limit)
            down = machines_are_down(present, awaited, self.heartbeats.silent)
            if expired or ((down or not awaited) and self.worker == min(present)):
                return self._propose(number, before, sorted(present), admits)
        raise AssertionError

    def is_decided(self, number: int) -> bool:
        """Return True if a decision on generation ``number`` exists, or the training has ended."""
        keys = f"generation/{number}/decided", "ended"
        return self.call(lambda: any(self.store.get(key) is not None for key in keys))

    def leave(self, number: int, *, ended: bool) -> None:
        """Announce to the members of generation ``number`` that this worker leaves permanently.

        ``ended`` is True if the training has ended on all workers.
        """

        def announce() -> None:
            self.store.put("ended" if ended else f"left/{self.worker}", True)
            self.store.put(f"generation/{number + 1}/wanted", True)

        with contextlib.suppress(StoreLostError):
            self.store.call(announce, "leaving", seconds=_LEAVE_SECONDS)
        # If the training has ended, the heartbeat connections stay open until the process exits:
        # other members may still be finishing, and would take this worker for dead.
        if ended:
            reports.tell(reports.FINISHED)
        else:
            self.heartbeats.close()

    def _propose(self, number: int, before: Decision, present: list[int], admits: bool) -> Decision:
        """Propose members of generation ``number``: ``present`` and workers that ask to join.

        Unless ``admits``, workers that ask to join are left to a later decision. Of ``present``,
        only workers that can all connect to each other are proposed. Returns the first proposal of
        any worker, which is the decision.
        """
        admitted = self.find_newcomers(before) if admits else replace(before, members=[])

        def propose() -> Decision:
            store = self.store.within(f"generation/{number}")
            arrivals = {worker: Arrival(**store.get(f"here/{worker}")) for worker in present}
            newcomers = {worker for worker in present if arrivals[worker].newcomer}
            unreachable = {worker: arrivals[worker].unreachable for worker in present}
            staying = connected(unreachable, newcomers)
            decision = replace(
                admitted,
                members=sorted({*staying, *admitted.members}),
                disconnected=[worker for worker in present if worker not in staying],
            )
            return Decision(**store.put_if_absent("decided", asdict(decision)))

        return self.call(propose)

    def find_newcomers(self, before: Decision) -> Decision:
        """Return a decision that admits the workers that ask to join, and no other worker.

        These are the workers that the decision ``before`` did not consider, which have written
        their address, and to which this worker can connect.
        """

        def read() -> tuple[int, list[int], dict[int, str]]:
            unused = self.store.get("numbers") or 0
            workers = [*before.unannounced, *range(before.next_identity, unused)]
            return unused, workers, self._read_addresses(workers)

        unused, workers, addresses = self.call(read)
        unannounced = [worker for worker in workers if worker not in addresses]
        others = {w: addresses[w] for w in {*addresses} - {self.worker} - self.heartbeats.refused}
        refused = {*self.heartbeats.connect(others), *self.heartbeats.refused}
        members = sorted({*addresses} - refused - self.heartbeats.dead())
        return Decision(members, unused, unannounced=unannounced)

    def request(self, number: int) -> None:
        """Request a change to generation ``number``, which members that train notice."""
        self.call(lambda: self.store.put(f"generation/{number}/wanted", True))

    def connect_heartbeats(self, members: Iterable[int]) -> list[int]:
        """Connect to those ``members`` that are not monitored yet. Return the unreachable ones."""
        others = [w for w in members if w != self.worker and not self.heartbeats.monitors(w)]
        return self.heartbeats.connect(self._addresses(others)) if others else []

    def ping(self, members: Iterable[int]) -> list[int]:
        """Ping ``members``, and return those that do not answer. Blocks for at most about 4 s."""
        return self.heartbeats.ping(self._addresses({*members} - {self.worker}))

    def _addresses(self, workers: Iterable[int]) -> dict[int, str]:
        return self.call(partial(self._read_addresses, workers))

    def _read_addresses(self, workers: Iterable[int]) -> dict[int, str]:
        addresses = {worker: self.store.get(f"address/{worker}") for worker in workers}
        return {worker: text for worker, text in addresses.items() if text is not None}

    def call(self, function: Callable[[], T]) -> T:
        """Return the result of ``function``, which accesses the store.

        Raises StoreLostError if ``function`` failed or took longer than ``timeout_seconds``.
        """
        what = f"rank {self.worker}: agreeing on the next generation failed"
        return self.store.call(function, what, seconds=self.timeout_seconds)
