"""The shared store of an elastic training: the key-value store of ``torch.distributed``."""

import json
import os
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from offbeat.elastic.address import parse_address
from offbeat.errors import CommunicationError
from offbeat.transport.torch_backend.store_access import call_within

T = TypeVar("T")
_LIMIT_SECONDS = 10.0  # default time limit of SharedStore.call()
_CONNECT_SECONDS = 30.0  # longest wait for a connection to the store
_MARGIN_SECONDS = 1.0  # extra time in which torch raises its own time-out error


class StoreLostError(CommunicationError):
    """The store cannot be reached. Without it the workers cannot agree on the next generation."""


class SharedStore:
    """A store of JSON values under string keys.

    A method may block for minutes if the store does not answer. ``call`` limits the time.

    ``location`` is the address of the store, for error messages.
    """

    def __init__(self, store: Any, location: str) -> None:
        self.store, self.location = store, location

    def within(self, prefix: str) -> "SharedStore":
        """Return the part of this store whose keys begin with ``prefix`` and a slash.

        ``store.within("a").get("b")`` is the same as ``store.get("a/b")``.
        """
        return SharedStore(dist.PrefixStore(prefix, self.store), self.location)  # type: ignore[attr-defined]

    def put(self, key: str, value: object) -> None:
        """Write a value. May return before the write has reached the store."""
        self.store.set(key, json.dumps(value))

    def get(self, key: str) -> Any:
        """Read a value. Returns None if the key does not exist."""
        return json.loads(self.store.get(key)) if self.store.check([key]) else None

    def put_if_absent(self, key: str, value: object) -> Any:
        """Write a value unless the key exists, and return the value that the key then has.

        The operation is atomic: if several workers call it, all of them return the same value.
        """
        return json.loads(self.store.compare_set(key, "", json.dumps(value)))

    def replace(self, key: str, old: object, new: object) -> None:
        """Write ``new`` if the value is ``old``. The operation is atomic."""
        self.store.compare_set(key, json.dumps(old), json.dumps(new))

    def next_number(self, key: str) -> int:
        """Return the next number of the counter ``key``: 0, 1, 2, … The operation is atomic."""
        return int(self.store.add(key, 1)) - 1

    def present(self, pattern: str, workers: Iterable[int]) -> list[int]:
        """Return those ``workers`` for which the key ``pattern.format(worker)`` exists."""
        keys = {worker: pattern.format(worker) for worker in workers}
        if not keys or self.store.check(list(keys.values())):
            return list(keys)
        return [worker for worker, key in keys.items() if self.store.check([key])]

    def call(self, function: Callable[[], T], what: str, *, seconds: float = _LIMIT_SECONDS) -> T:
        """Call ``function``, which accesses this store, in a thread, and return its result.

        ``what`` is the beginning of the error message. Raises StoreLostError if ``function`` failed
        or took longer than ``seconds``.
        """
        try:
            return call_within(seconds, function)
        except RuntimeError as error:
            reason = str(error).splitlines()[0][:200]
        raise StoreLostError(
            f"{what}: the store at {self.location} cannot be reached ({reason}). Elastic "
            "training needs it to agree on the next generation. This worker is cut off, or the "
            "process that kept the store has ended: keep it in a process that outlives the "
            "workers, with offbeat store"
        )


def connect_to_store(address: str, timeout_seconds: float, *, what: str) -> SharedStore:
    """Connect to the store that all workers share.

    Args:
        address: ``host:port``, or ``file:///path`` of a file, which is created if it is missing.
        timeout_seconds: Time limit for connecting to ``host:port``; the limit is at most 30 s.
        what: Beginning of the error message.

    Raises:
        StoreLostError: No store answers, or the directory of the file does not exist.
        ValueError: The address has another form.
    """
    where = parse_address(address)
    if isinstance(where, str):
        folder = os.path.dirname(where)
        if not os.path.exists(folder):
            raise StoreLostError(f"{what}: there is no directory {folder} for the store {address}")
        return SharedStore(dist.FileStore(where), address)  # type: ignore[attr-defined]
    seconds = min(timeout_seconds, _CONNECT_SECONDS)

    def connect() -> Any:
        return dist.TCPStore(  # type: ignore[attr-defined]
            *where,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=seconds),
        )

    # TCPStore waits forever if the server process accepts the connection but never answers, for
    # example because a signal has stopped it.
    try:
        return SharedStore(call_within(seconds + _MARGIN_SECONDS, connect), address)
    except RuntimeError as error:
        reason = str(error).splitlines()[0][:200]
    raise StoreLostError(f"{what}: no store answers at {address} within {seconds:g} s: {reason}")
