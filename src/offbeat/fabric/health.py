"""After a failure: who is still there, and telling the others that this worker has given up."""

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

_SECONDS = 3.0  # how long the others have to say that they are alive
_TAG = 2**15  # of messages that nobody sends


class Health:
    """A gloo group beside the group that does the work, used only when that has failed.

    Args:
        members: Global ranks of the workers.
    """

    def __init__(self, members: list[int]) -> None:
        self._group = dist.new_group(
            members,
            timeout=timedelta(seconds=_SECONDS),
            backend="gloo",
            use_local_synchronization=True,
        )
        self._messages: list[dist.Work | None] = []  # gloo may lose one that nobody holds

    def missing(self) -> tuple[list[int], list[int]]:
        """Ranks whose connection is gone, and ranks that do not answer. Takes up to 3 s."""
        rank, size = dist.get_rank(self._group), dist.get_world_size(self._group)
        others = [other for other in range(size) if other != rank]
        with ThreadPoolExecutor(len(others)) as pool:  # a time-out of one must not cost another
            found = dict(zip(others, pool.map(self._ask, others), strict=True))
        return (
            [other for other in others if found[other] == "gone"],
            [other for other in others if found[other] == "silent"],
        )

    def _ask(self, other: int) -> Literal["well", "gone", "silent"]:
        started = time.perf_counter()
        try:
            self._messages.append(dist.isend(torch.ones(1), group=self._group, group_dst=other))
            answer = dist.irecv(torch.zeros(1), group=self._group, group_src=other)
            if answer is not None:
                answer.wait(timedelta(seconds=_SECONDS))
        except RuntimeError:
            return "gone" if time.perf_counter() - started < 0.9 * _SECONDS else "silent"
        return "well"


def hang_up(group: dist.ProcessGroup | None) -> None:
    """Close the connections of a gloo group that has failed here, so that it fails everywhere.

    Otherwise workers that are not neighbours of the missing one in the ring would find out only
    by their own time-out. gloo closes a connection on which a receive has timed out.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    for other in range(size):
        if other != rank:
            with contextlib.suppress(RuntimeError):
                work = dist.irecv(torch.zeros(1), group=group, group_src=other, tag=_TAG)
                if work is not None:
                    work.wait(timedelta(milliseconds=1))
