"""Exit reasons: workers publish why they leave, because a lost connection does not tell."""

from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeVar, cast

from offbeat.transport.torch_backend.store_access import KeyPoll, call_within

T = TypeVar("T")
ExitReason = Literal["gave up", "failed"]
_ALARM = "alarm"  # key that exists once any worker has left
_STORE_SECONDS = 1.0
_POLL_SECONDS = 1.0


class ExitReasons:
    """The exit reasons of the workers of one communicator, in the store of their process group.

    A worker that closes by itself publishes "gave up". A worker that closes because an operation
    failed publishes "failed". A killed worker publishes nothing. This has two uses:

    * An error names the worker that was lost first, and not those that failed because of it.
    * A worker that waits for a healthy peer learns that a third worker was lost.

    Args:
        store: Store whose keys belong to these workers alone.
        rank: Rank of this worker.
    """

    def __init__(self, store: Any, rank: int) -> None:
        self._store, self._rank = store, rank
        self._poll = KeyPoll(store, _ALARM, _POLL_SECONDS)

    def publish(self, reason: ExitReason) -> None:
        """Publish the exit reason of this worker. Takes at most a second."""

        def write() -> bool:
            self._store.set(self._key(self._rank), reason)
            self._store.set(_ALARM, "")
            return bool(self._store.check([_ALARM]))  # the answer confirms both writes

        self._within_limit(write)

    def read(self, ranks: Iterable[int]) -> dict[int, ExitReason] | None:
        """Return the exit reasons of those ``ranks`` that published one; None without a store."""

        def read() -> dict[int, ExitReason]:
            keys = {rank: self._key(rank) for rank in ranks}
            left = [rank for rank, key in keys.items() if self._store.check([key])]
            return {rank: cast(ExitReason, self._store.get(keys[rank]).decode()) for rank in left}

        return self._within_limit(read)

    def any_published(self) -> bool:
        """Return True if a worker is known to have left. Never blocks; asks once a second."""
        return self._poll.found()

    def close(self) -> None:
        """Stop asking the store."""
        self._poll.close()

    def _key(self, rank: int) -> str:
        return f"left/{rank}"

    def _within_limit(self, function: Callable[[], T]) -> T | None:
        """Return ``function()``, or None if the store is lost or does not answer in time."""
        if self._poll.store_lost:
            return None
        try:
            return call_within(_STORE_SECONDS, function)
        except RuntimeError:
            self._poll.store_lost = True
            return None
