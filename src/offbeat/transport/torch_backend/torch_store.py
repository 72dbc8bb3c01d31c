"""A key-value store on a store of ``torch.distributed``."""

import threading
from typing import Any

import torch.distributed as dist
from typing_extensions import override

from offbeat.transport.key_value_store import KeyValueStore
from offbeat.transport.torch_backend.threads import close_at_exit

_CLOSE_SECONDS = 1.0  # longest wait for an operation in progress at exit


class TorchStore(KeyValueStore):
    """A store on ``store``, over a connection of its own; None keeps the values in this process.

    Several threads may use it; their operations follow one another.
    """

    def __init__(self, store: Any = None) -> None:
        self._store: Any = dist.HashStore() if store is None else store.clone()  # type: ignore[attr-defined]
        self._closed = False
        self._lock = threading.Lock()
        close_at_exit(self)

    @override
    def add(self, key: str, amount: int) -> int:
        with self._lock:
            self._require_open()
            return int(self._store.add(key, amount))

    @override
    def compare_set(self, key: str, expected: str, value: str) -> str:
        with self._lock:
            self._require_open()
            return _text(self._store.compare_set(key, expected, value))

    @override
    def get(self, key: str) -> str:
        with self._lock:
            self._require_open()
            # ``get`` alone would wait for a key that does not exist.
            return _text(self._store.get(key)) if self._store.check([key]) else ""

    @override
    def put(self, key: str, value: str) -> None:
        with self._lock:
            self._require_open()
            self._store.set(key, value)

    def close(self) -> None:
        """Refuse further operations, and wait at most a second for one in progress.

        At exit, Python would abort if a thread were inside the store.
        """
        self._closed = True
        if self._lock.acquire(timeout=_CLOSE_SECONDS):
            self._lock.release()

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError("this process is about to exit")


def _text(value: Any) -> str:
    return str(value.decode()) if isinstance(value, bytes) else str(value)
