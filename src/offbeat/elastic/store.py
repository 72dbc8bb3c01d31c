"""The store in which workers meet, so that no look at it can take longer than it may."""

import json
import os
import socket
import stat
import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch.distributed as dist

from offbeat.errors import CommunicationError

T = TypeVar("T")
_SLICES = 20  # of a wait: if this process is stopped meanwhile, that takes away one of them
_STORE_SECONDS = 10.0  # a store on a host that is cut off would take as long as TCP does


class StoreGoneError(CommunicationError):
    """The store does not answer. Without it nobody can agree on anything."""


class Board:
    """What all workers of a training can read and write: JSON values under keys.

    Args:
        store: It holds them.
        where: Its address, for errors.
    """

    def __init__(self, store: Any, where: str) -> None:
        self.store, self.where = store, where

    def within(self, name: str) -> "Board":
        """The keys that begin with ``name``, by the rest."""
        return Board(dist.PrefixStore(name, self.store), self.where)  # type: ignore[attr-defined]

    def put(self, key: str, value: object) -> None:
        """Write."""
        self.store.set(key, json.dumps(value))

    def get(self, key: str) -> Any:
        """Read; None if it is not there."""
        return json.loads(self.store.get(key)) if self.store.check([key]) else None

    def first(self, key: str, value: object) -> Any:
        """Write unless somebody has; what stands there then, for all."""
        return json.loads(self.store.compare_set(key, "", json.dumps(value)))

    def those(self, key: str, workers: Iterable[int]) -> list[int]:
        """The workers for which ``key``, with their number in it, is there."""
        keys = {worker: key.format(worker) for worker in workers}
        if not keys or self.store.check(list(keys.values())):
            return list(keys)
        return [worker for worker, one in keys.items() if self.store.check([one])]

    def promptly(
        self, function: Callable[[], T], who: str, *, seconds: float = _STORE_SECONDS
    ) -> T:
        """What ``function`` gives, which reads and writes here.

        Raises:
            StoreGoneError: it failed, or took longer than ``seconds``; ``who`` begins the message.
        """
        results: list[T] = []
        said: list[str] = []

        def run() -> None:
            try:
                results.append(function())
            except RuntimeError as error:
                said.append(str(error).splitlines()[0][:200])

        thread = threading.Thread(target=run, name="store", daemon=True)
        thread.start()
        for _ in range(_SLICES):
            if thread.is_alive():
                thread.join(seconds / _SLICES)
        if results:
            return results[0]
        why = said[0] if said else f"no answer within {seconds:g} s"
        raise StoreGoneError(
            f"{who}: the store of the process group at {self.where} cannot be reached ({why}). "
            "Workers agree there on who goes on: this one is cut off, or the process that kept the "
            'store has ended; keep it in one that outlives them, see "Elastic training"'
        )


def base_of(store: Any) -> Any:
    """The store below all prefixes, which other processes can reach."""
    while isinstance(store, dist.PrefixStore):  # type: ignore[attr-defined]
        store = store.underlying_store
    return store


def place_of(store: Any) -> str:
    """Where a store is, as a person would say it."""
    if isinstance(store, dist.TCPStore):  # type: ignore[attr-defined]
        return f"{store.host}:{store.port}"
    return str(getattr(store, "path", type(store).__name__))


def kept_here(store: Any) -> bool:
    """Whether a TCPStore lives in this process, and ends with it. Where Linux can tell."""
    tcp = isinstance(store, dist.TCPStore)  # type: ignore[attr-defined]
    if not tcp or not os.path.isdir("/proc/self/fd"):
        return False
    return any(_listens(int(name), store.port) for name in os.listdir("/proc/self/fd"))


def _listens(descriptor: int, port: int) -> bool:
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return False
        with socket.socket(fileno=os.dup(descriptor)) as one:
            listening = one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            return bool(listening) and one.getsockname()[1] == port
    except (OSError, IndexError):
        return False
