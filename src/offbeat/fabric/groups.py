"""Process groups of one's own: opened beside the user's, closed without a trace.

gloo groups are made directly, not registered with ``torch.distributed``: a registered one gets its
name from the number of those that exist, so one that is opened after another was destroyed would
find that one's addresses in the store.
"""

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist

_HANG_UP_TAG = 2**15  # of messages that nobody sends
_numbers: dict[tuple[int, ...], Iterator[int]] = defaultdict(itertools.count)
"""By members: how many groups this process has opened with them; the same on all of them."""


class Group(Protocol):
    """What is used of a process group, registered or not."""

    allreduce: Any
    broadcast: Any
    allgather: Any
    alltoall_base: Any
    send: Any
    recv: Any

    def rank(self) -> int:
        """This worker's."""

    def size(self) -> int:
        """How many workers."""


class GroupFactory:
    """Opens groups of the members of ``group``; None is the default group.

    Attributes:
        rank: This worker's in them.
        size: How many members there are.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._members = tuple(dist.get_process_group_ranks(group))
        self.rank, self.size = dist.get_rank(group), len(self._members)
        self._store = (group or dist.group.WORLD).get_group_store()  # type: ignore[union-attr]
        self._meeting: Any = None  # the store of the last opening: who has come

    def open(self, backend: str, timeout_seconds: float) -> Group:
        """A new group. A collective of the members."""
        limit = timedelta(seconds=timeout_seconds)
        if backend != "gloo":
            return cast(
                Group,
                dist.new_group(
                    list(self._members),
                    timeout=limit,
                    backend=backend,
                    use_local_synchronization=True,
                ),
            )
        name = f"offbeat/{'-'.join(map(str, self._members))}/{next(_numbers[self._members])}"
        store = dist.PrefixStore(name, self._store)  # type: ignore[attr-defined]
        self._meeting = store
        store.set(f"here/{self.rank}", "")
        return cast(Group, dist.ProcessGroupGloo(store, self.rank, self.size, limit))

    def absent(self) -> list[int]:
        """Ranks that have not come to the last opening, as far as that is known."""
        if self._meeting is None:
            return []
        with contextlib.suppress(RuntimeError):  # the store is gone, too
            meeting = self._meeting
            return [rank for rank in range(self.size) if not meeting.check([f"here/{rank}"])]
        return []


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
