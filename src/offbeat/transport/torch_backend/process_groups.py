"""Process groups separate from the user's: opened without a trace in torch, and closed reliably.

Gloo groups are constructed directly, without registration in ``torch.distributed``. Torch names a
registered group by the number of existing ones. A group opened after another was destroyed would
therefore get a name that was used before, and find old addresses in the store.
"""

import atexit
import contextlib
import functools
import itertools
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist

_UNUSED_TAG = 2**15  # tag under which no worker sends
_GIVEN_UP = "given up"  # key in the store of one opening: a rank that has stopped waiting
_POLL_SECONDS = 0.0005, 0.05  # time between two looks at the store: at first, and at most
_MARGIN_SECONDS = 1.0  # delay with which gloo may notice its time limit
_numbers: dict[tuple[int, ...], Iterator[int]] = defaultdict(itertools.count)
"""By members: counts the groups that this process opened with them. Equal on all members."""
_abandoned: list[tuple[threading.Thread, float]] = []
"""Abandoned threads, blocked in gloo, each with a deadline (monotonic clock)."""


def abandon_thread(thread: threading.Thread, deadline: float) -> None:
    """Stop waiting for a thread blocked in gloo. At exit Python waits for it until ``deadline``."""
    _abandoned[:] = [(other, limit) for other, limit in _abandoned if other.is_alive()]
    _abandoned.append((thread, deadline))


@atexit.register
def _join_abandoned() -> None:
    """Wait for abandoned threads: Python would abort if one returned from gloo during shutdown."""
    for thread, deadline in _abandoned:
        thread.join(max(0.0, deadline - time.monotonic()))


class Group(Protocol):
    """The part of a process group that is used here, whether it is registered or not."""

    allreduce: Any
    broadcast: Any
    allgather: Any
    alltoall_base: Any
    send: Any
    recv: Any
    set_timeout: Any

    def rank(self) -> int:
        """Return the rank of this worker."""

    def size(self) -> int:
        """Return the number of workers."""


class OpeningError(RuntimeError):
    """Not all members take part in the opening of a group."""


class GroupFactory:
    """Opens process groups of some workers. All members open the same number of groups.

    Args:
        store: Store in which the members exchange addresses.
        rank: Rank of this worker in the groups.
        size: Number of members.
        name: Prefix of the keys of these members.
        numbers: Counts the groups.
        opening_seconds: Time limit of an opening, if it is less than that of an operation.
        lost: Returns the ranks whose processes have ended; None without failure detection.
        abandoned_key: Key in ``store`` that exists once some members open no more groups; "" if
            there is no such key.

    Attributes:
        backend: Backend of the groups for collectives.
        store: Store of the last opening. Its keys belong to these members alone.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        name: str,
        numbers: Iterator[int],
        *,
        opening_seconds: float = math.inf,
        lost: Callable[[], list[int]] | None = None,
        abandoned_key: str = "",
    ) -> None:
        self.rank, self.size, self.lost = rank, size, lost
        self.backend = "gloo"
        self.store: Any = None
        self._store, self._name, self._numbers = store, name, numbers
        self._opening_seconds, self._abandoned_key = opening_seconds, abandoned_key
        self._members: list[int] = []  # ranks in torch's default group

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> "GroupFactory":
        """Return the factory for all members of ``group``; None is the default group."""
        parent: Any = dist.group.WORLD if group is None else group
        return cls.among(group, range(len(dist.get_process_group_ranks(parent))))

    @classmethod
    def among(cls, group: dist.ProcessGroup | None, ranks: Sequence[int]) -> "GroupFactory":
        """Return the factory for the members of ``group`` with these ranks, this one included."""
        parent: Any = dist.group.WORLD if group is None else group
        global_ranks = dist.get_process_group_ranks(parent)
        members = tuple(global_ranks[rank] for rank in ranks)
        store = parent.get_group_store()
        name = f"offbeat/{'-'.join(map(str, members))}"
        rank = ranks.index(dist.get_rank(group))
        factory = cls(store, rank, len(members), name, _numbers[members])
        factory._members, factory.backend = list(members), str(dist.get_backend(group))
        return factory

    def keys(self) -> Any:
        """Return a new, empty store of the members. All members call it equally often."""
        name = f"{self._name}/{next(self._numbers)}"
        return dist.PrefixStore(name, self._store)  # type: ignore[attr-defined]

    def open(self, backend: str, timeout_seconds: float) -> Group:
        """Open a new group. A collective of the members.

        The members first wait for each other in the store. Inside the backend a Ctrl-C would be
        delayed, and an error would name no ranks.

        Raises:
            OpeningError: A member did not arrive in time, or gave up.
            RuntimeError: The store is lost, or a member left after it had arrived.
        """
        self.store = self.keys()
        opening_seconds = min(self._opening_seconds, timeout_seconds)
        try:
            self._await_members(opening_seconds)
            make = functools.partial(self._make, backend, timedelta(seconds=opening_seconds))
            group = make() if self.lost is None else self._in_thread(make, opening_seconds)
            if opening_seconds < timeout_seconds:
                group.set_timeout(timedelta(seconds=timeout_seconds))
            return group
        except BaseException as error:
            if not isinstance(error, dist.DistNetworkError):  # in that case the store is lost
                with contextlib.suppress(RuntimeError):
                    self.store.set(_GIVEN_UP, str(self.rank))
            raise

    def _make(self, backend: str, limit: timedelta) -> Group:
        if backend == "gloo":
            # A separate connection to the store, if another thread polls the store meanwhile.
            store = self.store if self.lost is None else self.store.clone()
            return cast(Group, dist.ProcessGroupGloo(store, self.rank, self.size, limit))
        group = dist.new_group(
            self._members, timeout=limit, backend=backend, use_local_synchronization=True
        )
        return cast(Group, group)

    def _in_thread(self, make: Callable[[], Group], timeout_seconds: float) -> Group:
        """Return ``make()``, run in a thread that is abandoned if a member dies meanwhile.

        Gloo would wait for the dead member until the time limit, and sometimes longer.
        """
        results: list[Group] = []
        errors: list[RuntimeError] = []

        def run() -> None:
            try:
                results.append(make())
            except RuntimeError as error:
                errors.append(error)

        thread = threading.Thread(target=run, name="opening of a group", daemon=True)
        deadline = time.monotonic() + timeout_seconds + _MARGIN_SECONDS
        thread.start()
        try:
            while thread.is_alive():
                thread.join(_POLL_SECONDS[1])
                if thread.is_alive():
                    self._require_members()
                    if time.monotonic() > deadline:
                        raise OpeningError("gloo did not connect all members that had arrived")
        except BaseException:
            abandon_thread(thread, deadline)
            raise
        if errors:
            raise errors.pop()
        return results.pop()

    def _require_members(self) -> None:
        """Raise OpeningError if a member is known not to take part, or no longer to."""
        if self.lost is not None and (lost := self.lost()):
            raise OpeningError(f"{ranks_text(lost)} died")
        if self._abandoned_key and self._store.check([self._abandoned_key]):
            raise OpeningError("others have given up this view")
        if self.store.check([_GIVEN_UP]):
            raise OpeningError(f"rank {int(self.store.get(_GIVEN_UP))} has given up")

    def _await_members(self, timeout_seconds: float) -> None:
        deadline, (pause, longest) = time.monotonic() + timeout_seconds, _POLL_SECONDS
        self.store.set(f"here/{self.rank}", "")
        keys = [f"here/{rank}" for rank in range(self.size)]
        while True:
            self._require_members()
            if self.store.check(keys):
                return
            if time.monotonic() > deadline:
                absent = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
                raise OpeningError(f"{ranks_text(absent)} did not come")
            time.sleep(pause)
            pause = min(2 * pause, longest)


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ``rank 1``, or ``ranks 0, 2``."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def close_connections(group: Group) -> None:
    """Close the connections of a gloo group, so that pending operations fail on all workers.

    Otherwise a worker that is not a neighbour of the missing one in the ring would notice only
    at its own time limit. Gloo closes a connection on which a receive has timed out. Its own abort
    does not wake pending operations.
    """
    if not isinstance(group, dist.ProcessGroupGloo):
        return
    for peer in range(group.size()):
        if peer != group.rank():
            with contextlib.suppress(RuntimeError):
                work = group.recv([torch.zeros(1)], peer, _UNUSED_TAG)
                work.wait(timedelta(milliseconds=1))


def close(group: Group) -> None:
    """Release a group that is no longer used. Not a collective.

    A gloo group ends with its last reference. Torch destroys NCCL groups of all workers. A group of
    some workers is kept, because torch would give its name to the next group (see the module).
    """
    if isinstance(group, dist.ProcessGroup) and group.size() == dist.get_world_size():
        dist.destroy_process_group(group)


def release(references: list[Group], *, in_background: bool) -> None:
    """Drop the last references to groups.

    Args:
        references: List of groups, which is cleared.
        in_background: True if an operation of the groups still runs. Gloo then blocks until the
            time limit of the operation, so the references are dropped in a thread.
    """
    if not in_background:
        references.clear()
        return
    with contextlib.suppress(RuntimeError):  # the interpreter is shutting down
        threading.Thread(target=references.clear, name="closing of a group", daemon=True).start()
