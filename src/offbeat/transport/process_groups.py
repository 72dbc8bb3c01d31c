"""Process groups of one's own: opened beside the user's, closed without a trace.

gloo groups are made directly, not registered with ``torch.distributed``: a registered one gets its
name from the number of those that exist, so one that is opened after another was destroyed would
find that one's addresses in the store.
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

_HANG_UP_TAG = 2**15  # of messages that nobody sends
_GIVEN_UP = "given up"  # key in the store of an opening: the rank that waits no longer
_LOOKS = 0.0005, 0.05  # seconds between looks who has come: at first, and at most
_MORE_SECONDS = 1.0  # than its time-out: how long gloo may take to notice that
_numbers: dict[tuple[int, ...], Iterator[int]] = defaultdict(itertools.count)
"""By members: how many groups this process has opened with them; the same on all of them."""
_left: list[tuple[threading.Thread, float]] = []
"""Threads inside gloo that are left to themselves, and until when they may take."""


def leave(thread: threading.Thread, until: float) -> None:
    """Let a thread inside gloo be; Python waits for it at its end, by the monotonic clock."""
    _left[:] = [(one, deadline) for one, deadline in _left if one.is_alive()]
    _left.append((thread, until))


@atexit.register
def _await_left() -> None:
    """Python would abort with a thread that comes out of gloo during its end."""
    for thread, deadline in _left:
        thread.join(max(0.0, deadline - time.monotonic()))


class Group(Protocol):
    """What is used of a process group, registered or not."""

    allreduce: Any
    broadcast: Any
    allgather: Any
    alltoall_base: Any
    send: Any
    recv: Any
    set_timeout: Any

    def rank(self) -> int:
        """This worker's."""

    def size(self) -> int:
        """How many workers."""


class MeetingError(RuntimeError):
    """Not all members have come to an opening."""


class GroupFactory:
    """Opens groups of some workers, which all open as many.

    Args:
        store: They meet in it, under ``name``.
        rank: This worker's in the groups.
        size: How many members there are.
        name: Of these members alone.
        numbers: Of their groups.
        opening_seconds: How long an opening may take, if less than an operation.
        lost: Gives the ranks of those whose processes have ended; None if nobody watches them.
        over: Key in ``store`` that is there once some of them will open no more.

    Attributes:
        backend: Of the groups that do the work.
        rank: As above.
        size: As above.
        lost: As above.
        store: Of the last opening: keys of these members alone.
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
        over: str = "",
    ) -> None:
        self.rank, self.size, self.lost = rank, size, lost
        self.backend = "gloo"
        self.store: Any = None
        self._store, self._name, self._numbers = store, name, numbers
        self._opening_seconds, self._over = opening_seconds, over
        self._members: list[int] = []  # in torch's default group

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> "GroupFactory":
        """Of the members of ``group``; None is the default group."""
        whole: Any = dist.group.WORLD if group is None else group
        return cls.among(group, range(len(dist.get_process_group_ranks(whole))))

    @classmethod
    def among(cls, group: dist.ProcessGroup | None, ranks: Sequence[int]) -> "GroupFactory":
        """Of those members of ``group`` that have ``ranks`` in it; this worker is one of them."""
        whole: Any = dist.group.WORLD if group is None else group
        everyone = dist.get_process_group_ranks(whole)
        members = tuple(everyone[rank] for rank in ranks)
        store = whole.get_group_store()
        name = f"offbeat/{'-'.join(map(str, members))}"
        rank = ranks.index(dist.get_rank(group))
        made = cls(store, rank, len(members), name, _numbers[members])
        made._members, made.backend = list(members), str(dist.get_backend(group))
        return made

    def keys(self) -> Any:
        """A store of these members alone, empty: another one each time. All ask as often."""
        name = f"{self._name}/{next(self._numbers)}"
        return dist.PrefixStore(name, self._store)  # type: ignore[attr-defined]

    def open(self, backend: str, timeout_seconds: float) -> Group:
        """A new group. A collective of the members.

        They meet first: what backends do here lets no Ctrl-C through and names nobody.

        Raises:
            MeetingError: one did not come, or gives up.
            RuntimeError: the store is gone, or one left just after it had come.
        """
        self.store = self.keys()
        opening_seconds = min(self._opening_seconds, timeout_seconds)
        try:
            self._meet(opening_seconds)
            make = functools.partial(self._make, backend, timedelta(seconds=opening_seconds))
            group = make() if self.lost is None else self._beside(make, opening_seconds)
            if opening_seconds < timeout_seconds:
                group.set_timeout(timedelta(seconds=timeout_seconds))
            return group
        except BaseException as error:
            if not isinstance(error, dist.DistNetworkError):  # else nobody would read it
                with contextlib.suppress(RuntimeError):
                    self.store.set(_GIVEN_UP, str(self.rank))
            raise

    def _make(self, backend: str, limit: timedelta) -> Group:
        if backend == "gloo":
            # Its own connection to the store, if another thread looks into that meanwhile.
            store = self.store if self.lost is None else self.store.clone()
            return cast(Group, dist.ProcessGroupGloo(store, self.rank, self.size, limit))
        group = dist.new_group(
            self._members, timeout=limit, backend=backend, use_local_synchronization=True
        )
        return cast(Group, group)

    def _beside(self, make: Callable[[], Group], timeout_seconds: float) -> Group:
        """``make()``, in a thread that is left to itself if one dies while all connect.

        gloo would wait for that one until the time-out, and now and then longer.
        """
        made: list[Group] = []
        failed: list[RuntimeError] = []

        def run() -> None:
            try:
                made.append(make())
            except RuntimeError as error:
                failed.append(error)

        thread = threading.Thread(target=run, name="opening of a group", daemon=True)
        deadline = time.monotonic() + timeout_seconds + _MORE_SECONDS
        thread.start()
        try:
            while thread.is_alive():
                thread.join(_LOOKS[1])
                if thread.is_alive():
                    self._look_out()
                    if time.monotonic() > deadline:
                        raise MeetingError("gloo did not connect all who had come")
        except BaseException:
            leave(thread, deadline)
            raise
        if failed:
            raise failed.pop()
        return made.pop()

    def _look_out(self) -> None:
        """Raise if not all will come, or one that had come has left."""
        if self.lost is not None and (lost := self.lost()):
            raise MeetingError(f"{ranks_text(lost)} died")
        if self._over and self._store.check([self._over]):
            raise MeetingError("others have given up this view")
        if self.store.check([_GIVEN_UP]):
            raise MeetingError(f"rank {int(self.store.get(_GIVEN_UP))} has given up")

    def _meet(self, timeout_seconds: float) -> None:
        deadline, (pause, longest) = time.monotonic() + timeout_seconds, _LOOKS
        self.store.set(f"here/{self.rank}", "")
        everyone = [f"here/{rank}" for rank in range(self.size)]
        while True:
            self._look_out()
            if self.store.check(everyone):
                return
            if time.monotonic() > deadline:
                absent = [r for r, key in enumerate(everyone) if not self.store.check([key])]
                raise MeetingError(f"{ranks_text(absent)} did not come")
            time.sleep(pause)
            pause = min(2 * pause, longest)


def ranks_text(ranks: Sequence[int]) -> str:
    """As in ``rank 1``, ``ranks 0, 2``."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def hang_up(group: Group) -> None:
    """Close the connections of a gloo group, so that what is under way fails everywhere.

    Otherwise workers that are not neighbours of the missing one in the ring would find out only
    by their own time-out. gloo closes a connection on which a receive has timed out; its own abort
    leaves waiting operations alone.
    """
    if not isinstance(group, dist.ProcessGroupGloo):
        return
    for other in range(group.size()):
        if other != group.rank():
            with contextlib.suppress(RuntimeError):
                work = group.recv([torch.zeros(1)], other, _HANG_UP_TAG)
                work.wait(timedelta(milliseconds=1))


def close(group: Group) -> None:
    """Give a group back that nobody uses any more. Not a collective.

    A gloo group ends with the last reference to it. NCCL's are destroyed by torch, except that of
    some of the workers, for the reason at the top of this file.
    """
    if isinstance(group, dist.ProcessGroup) and group.size() == dist.get_world_size():
        dist.destroy_process_group(group)


def let_go(held: list[Group], *, beside: bool) -> None:
    """Drop the last references to groups.

    Args:
        held: They are taken out of it.
        beside: In a thread, because an operation of theirs runs until its time-out: gloo waits for
            it, now and then one that has missed the end of its connections.
    """
    if not beside:
        held.clear()
        return
    with contextlib.suppress(RuntimeError):  # the interpreter is ending, and everything with it
        threading.Thread(target=held.clear, name="ending of a group", daemon=True).start()
