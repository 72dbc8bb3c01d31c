"""The shared store of an elastic training, with a time limit for every access."""

import json
import os
import socket
import stat
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch.distributed as dist

from offbeat.errors import CommunicationError
from offbeat.transport.torch_backend.store_access import call_within

T = TypeVar("T")
_LIMIT_SECONDS = 10.0


class StoreLostError(CommunicationError):
    """The store does not answer. Without it the workers cannot agree on anything."""


class SharedStore:
    """JSON values under keys, which all workers of a training can read and write.

    Args:
        store: Store of ``torch.distributed`` that holds them.
        location: Address of the store, for error messages.
    """

    def __init__(self, store: Any, location: str) -> None:
        self.store, self.location = store, location

    def within(self, prefix: str) -> "SharedStore":
        """Return a view of the keys that begin with ``prefix``, which it omits."""
        return SharedStore(dist.PrefixStore(prefix, self.store), self.location)  # type: ignore[attr-defined]

    def put(self, key: str, value: object) -> None:
        """Write a value. Returns before the write has reached the store."""
        self.store.set(key, json.dumps(value))

    def get(self, key: str) -> Any:
        """Read a value. Returns None if the key does not exist."""
        return json.loads(self.store.get(key)) if self.store.check([key]) else None

    def put_if_absent(self, key: str, value: object) -> Any:
        """Write a value unless the key exists, atomically, and return the value of the key."""
        return json.loads(self.store.compare_set(key, "", json.dumps(value)))

    def present(self, pattern: str, workers: Iterable[int]) -> list[int]:
        """Return the workers for which the key ``pattern.format(worker)`` exists."""
        keys = {worker: pattern.format(worker) for worker in workers}
        if not keys or self.store.check(list(keys.values())):
            return list(keys)
        return [worker for worker, key in keys.items() if self.store.check([key])]

    def call(self, function: Callable[[], T], what: str, *, seconds: float = _LIMIT_SECONDS) -> T:
        """Return the result of ``function``, which reads and writes this store.

        Args:
            function: Run in a thread.
            what: Beginning of the error message.
            seconds: Time limit, without the time in which this process was stopped.

        Raises:
            StoreLostError: ``function`` failed or exceeded the time limit.
        """
        try:
            return call_within(seconds, function)
        except RuntimeError as error:
            reason = str(error).splitlines()[0][:200]
        raise StoreLostError(
            f"{what}: the store of the process group at {self.location} cannot be reached "
            f"({reason}). Elastic training needs it to agree on the next view. This worker is cut "
            "off, or the process that kept the store has ended: keep the store in a process that "
            'outlives the workers, see "Elastic training"'
        )


def without_prefixes(store: Any) -> Any:
    """Return the store below all prefixes, which other processes can open."""
    while isinstance(store, dist.PrefixStore):  # type: ignore[attr-defined]
        store = store.underlying_store
    return store


def location_of(store: Any) -> str:
    """Return the address of a store in readable form."""
    if isinstance(store, dist.TCPStore):  # type: ignore[attr-defined]
        return f"{store.host}:{store.port}"
    return str(getattr(store, "path", type(store).__name__))


def is_kept_here(store: Any) -> bool:
    """Return True if this process serves a TCPStore, which then ends with it. Linux only.

    Torch does not tell; a listening socket on the port of the store does.
    """
    tcp = isinstance(store, dist.TCPStore)  # type: ignore[attr-defined]
    if not tcp or not os.path.isdir("/proc/self/fd"):
        return False
    return any(_listens(int(name), store.port) for name in os.listdir("/proc/self/fd"))


def _listens(descriptor: int, port: int) -> bool:
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return False
        with socket.socket(fileno=os.dup(descriptor)) as duplicate:
            listening = duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            return bool(listening) and duplicate.getsockname()[1] == port
    except (OSError, IndexError):
        return False
