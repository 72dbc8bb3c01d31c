"""Opening and closing of the process groups that Offbeat uses besides the user's.

To open a group, its members exchange their network addresses through a store. This module
constructs gloo groups directly, without registering them in ``torch.distributed``: torch names a
registered group after its members and the number of existing groups. After a group was destroyed, a
new one could get a name that was used before, and would find outdated addresses in the store.
"""

import contextlib
import functools
import itertools
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from offbeat.transport.torch_backend.store_access import NoAnswerError, call_within, polls
from offbeat.transport.torch_backend.threads import call_in_thread

_UNUSED_TAG = 2**15  # message tag with which no worker sends
_GIVEN_UP = "given up"  # key in the store: the first member that gave up opening the group, and why
_POLL_SECONDS = 0.0005, 0.05  # pauses between reads of the store: the first, and the longest
_MARGIN_SECONDS = 1.0  # delay with which gloo may notice its time limit
_STORE_SECONDS = 1.0  # longest wait for the store to accept that key, and least to answer
_GLOO_SECONDS = 2.0  # least time in which gloo must connect to a member that has arrived
_NOTICE_SECONDS = 0.2  # delay with which the end of a member may be noticed after gloo has failed
Group: TypeAlias = Any
"""A torch process group. Torch does not annotate all of its methods."""
_numbers: dict[tuple[int, ...], Iterator[int]] = defaultdict(itertools.count)
"""For each set of members (global ranks), the counter that makes the keys of their groups unique.

The members open the same groups in the same order, so their counters agree.
"""


def backends_of(group: dist.ProcessGroup | None) -> dict[str, str]:
    """Return the backend for each type of device, such as ``{"cpu": "gloo", "cuda": "nccl"}``.

    ``dist.get_backend`` returns texts such as "cpu:gloo", and "undefined" if the script has named
    no backend. None is the default group.
    """
    devices = dist.BackendConfig(dist.get_backend(group)).get_device_backend_map()
    return {device: str(backend) for device, backend in devices.items()}


class OpeningError(RuntimeError):
    """A group cannot be opened, because a member does not take part."""


class GroupFactory:
    """Opens any number of process groups of the same members.

    All members call ``open`` and ``new_store`` in the same order, and so use the same keys.

    Args:
        store: Store in which the members exchange addresses.
        rank: Rank of this worker in the groups.
        size: Number of members.
        name: Prefix of the keys that the groups use in ``store``.
        numbers: Counter that makes the key prefixes of ``new_store`` unique.
        opening_seconds: Time limit of ``open``, unless its argument ``timeout_seconds`` is less.
        lost: Function that returns the ranks of members whose processes have ended; None if they
            are not monitored.
        abandoned_key: Key in ``store`` that a member creates when it gives up. ``open`` then raises
            OpeningError. "": no key.

    Attributes:
        backend: Backend for collectives on a GPU, "gloo" or "nccl". Those on the CPU use gloo.
        store: The part of the store that the latest group uses; None before the first group.
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
        self._deadline = math.inf  # of the opening, by time.monotonic()

    @classmethod
    def among(
        cls,
        group: dist.ProcessGroup | None,
        ranks: Sequence[int] | None = None,
        *,
        inside: bool = False,
    ) -> "GroupFactory":
        """Return a factory for the members of ``group`` with these ranks in it, this one included.

        None is the default group, and all of its members. The new groups use gloo. If the members
        are ``inside`` one node, collectives on a GPU use the backend of ``group``.
        """
        parent: Any = dist.group.WORLD if group is None else group
        global_ranks = dist.get_process_group_ranks(parent)
        ranks = range(len(global_ranks)) if ranks is None else ranks
        members = tuple(global_ranks[rank] for rank in ranks)
        store = parent.get_group_store()
        name = f"offbeat/{'-'.join(map(str, members))}"
        rank = ranks.index(dist.get_rank(group))
        factory = cls(store, rank, len(members), name, _numbers[members])
        factory._members = list(members)
        if inside:
            factory.backend = backends_of(group).get("cuda", "gloo")
        return factory

    def new_store(self) -> Any:
        """Return a new, empty store for the members.

        It is a part of the factory's store, with a new key prefix. The prefix of the k-th call is
        the same on all members.
        """
        name = f"{self._name}/{next(self._numbers)}"
        return dist.PrefixStore(name, self._store)  # type: ignore[attr-defined]

    def open(self, backend: str, timeout_seconds: float) -> Group:
        """Open a new group. A collective of the members. Blocks.

        The members first wait for each other by polling the store. If they waited in the backend,
        Ctrl-C would be delayed, and errors would not name the missing ranks.

        Args:
            backend: "gloo" or "nccl".
            timeout_seconds: Time limit of the group's operations. Also limits the opening, unless
                ``opening_seconds`` is less.

        Raises:
            OpeningError: A member has ended, has given up, or did not arrive or connect in time.
            RuntimeError: The store does not answer, or the backend failed.
        """
        self.store = self.new_store()
        opening_seconds = min(self._opening_seconds, timeout_seconds)
        self._deadline = time.monotonic() + opening_seconds
        try:
            self._await_members()
            group = self._make(backend, opening_seconds)
            if backend == "gloo" or opening_seconds < timeout_seconds:
                group.set_timeout(timedelta(seconds=timeout_seconds))
            return group
        except BaseException as error:
            # A DistNetworkError means that the store does not answer.
            if not isinstance(error, dist.DistNetworkError):
                reason = str(error) if isinstance(error, OpeningError) else ""
                text = f"rank {self.rank} has given up: {reason}"
                # compare_set waits until the store has the key, so the key exists before this
                # process ends.
                write = functools.partial(self.store.compare_set, _GIVEN_UP, "", text)
                with contextlib.suppress(RuntimeError):
                    call_within(_STORE_SECONDS, write)
            raise

    def _make(self, backend: str, seconds: float) -> Group:
        """Construct a group. Gives up if a member ends, for which gloo would wait."""
        if backend != "gloo":
            limit = timedelta(seconds=seconds)
            return dist.new_group(self._members, limit, backend, use_local_synchronization=True)
        # Gloo waits five times its limit for a member that connects to this one.
        limit = timedelta(seconds=min(seconds, max(_GLOO_SECONDS, seconds / 5)))
        # This thread polls the store while gloo uses it, so each needs its own connection.
        store = self._ask(self.store.clone)
        self._deadline = time.monotonic() + seconds + _MARGIN_SECONDS

        def poll() -> None:
            self._ask(self._require_members)
            if time.monotonic() > self._deadline:
                raise OpeningError("gloo did not connect all members that had arrived")

        try:
            return call_in_thread(
                lambda: dist.ProcessGroupGloo(store, self.rank, self.size, limit),
                name="opening of a group",
                poll=poll,
                interval_seconds=_POLL_SECONDS[1],
            )
        except RuntimeError as error:
            if not isinstance(error, OpeningError):
                self._explain()
            raise

    def _explain(self) -> None:
        """Raise OpeningError if gloo failed because a member has ended or given up."""
        deadline = time.monotonic() + _NOTICE_SECONDS
        while time.monotonic() < deadline:
            self._ask(self._require_members)
            time.sleep(_POLL_SECONDS[0])

    def _require_members(self) -> None:
        """Raise OpeningError if a member has ended or given up."""
        if self._abandoned_key and self._store.check([self._abandoned_key]):
            raise OpeningError("others have given up this generation")
        # A member that gave up because another one died may have ended, too. It wrote the key
        # before it ended. So if ``lost`` contains this member, the key exists now.
        lost = [] if self.lost is None else self.lost()
        if self.store.check([_GIVEN_UP]):
            raise OpeningError(self.store.get(_GIVEN_UP).decode().removesuffix(": "))
        if lost:
            raise OpeningError(f"{ranks_text(lost)} died")

    def _await_members(self) -> None:
        self._ask(lambda: self.store.set(f"here/{self.rank}", ""))

        def absent() -> list[int]:
            self._require_members()
            keys = [f"here/{rank}" for rank in range(self.size)]
            if self.store.check(keys):
                return []
            return [rank for rank, key in enumerate(keys) if not self.store.check([key])]

        for _ in polls(*_POLL_SECONDS):
            missing = self._ask(absent)
            if not missing:
                return
            if time.monotonic() > self._deadline:
                raise OpeningError(f"{ranks_text(missing)} did not come")

    def _ask(self, function: Callable[[], Any]) -> Any:
        """Return the result of ``function``, which accesses the store, before the deadline."""
        seconds = max(_STORE_SECONDS, self._deadline - time.monotonic())
        try:
            return call_within(seconds, function)
        except NoAnswerError:
            raise OpeningError("the store does not answer") from None


def ranks_text(ranks: Sequence[int]) -> str:
    """Return a text such as ``rank 1`` or ``ranks 0, 2``."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def close_connections(group: Group) -> None:
    """Close the connections of a gloo group. Its operations then fail on all workers.

    Gloo's abort does not end running operations. But gloo closes a connection on which a receive
    times out. So this function receives a message that no worker sends, with a limit of 1 ms.
    """
    if not isinstance(group, dist.ProcessGroupGloo):
        return
    for peer in range(group.size()):
        if peer != group.rank():
            with contextlib.suppress(RuntimeError):
                work = group.recv([torch.zeros(1, device="cpu")], peer, _UNUSED_TAG)  # type: ignore[attr-defined]
                work.wait(timedelta(milliseconds=1))


def destroy_nccl_group(group: Group) -> None:
    """Destroy an NCCL group that contains all processes. Does nothing to other groups.

    A gloo group ends with its last reference. An NCCL group of some processes remains until torch
    is shut down, because torch would give its name to the next group; see the module docstring.
    """
    if isinstance(group, dist.ProcessGroup) and group.size() == dist.get_world_size():
        dist.destroy_process_group(group)
