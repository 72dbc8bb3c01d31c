"""Exit reasons: a worker that leaves publishes why. A lost connection does not show the reason."""

from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeVar

from offbeat.transport.torch_backend.store_access import KeyPoll, call_within

T = TypeVar("T")
ExitReason = Literal["gave up", "failed"]
_ALARM = "alarm"  # key that exists once any worker has published a reason
_STORE_SECONDS = 1.0  # time limit of an access to the store
_POLL_SECONDS = 1.0  # time between two checks of the alarm


class ExitReasons:
    """The exit reasons of the workers of one communicator, in a store that all of them can read.

    A worker publishes "failed" if one of its operations failed, and "gave up" if it closes alone
    without a failure. A killed worker publishes nothing. The reasons have two uses:

    * Error messages name the worker that was lost first. If worker 2 is killed, operations fail on
      workers 0 and 1, and both publish "failed". So worker 2, without a reason, is the cause.
    * A worker that waits for a healthy worker learns that a third worker has left or failed.

    Args:
        store: Store of ``torch.distributed`` that is used for nothing else.
        rank: Rank of this worker.
    """

    def __init__(self, store: Any, rank: int) -> None:
        self._store, self._rank = store, rank
        self._poll = KeyPoll(store, _ALARM, _POLL_SECONDS)

    def publish(self, reason: ExitReason) -> None:
        """Publish the exit reason of this worker. Blocks for at most about a second."""

        def write() -> bool:
            self._store.set(f"left/{self._rank}", reason)
            self._store.set(_ALARM, "")
            return bool(self._store.check([_ALARM]))  # waits until both writes have arrived

        self._within_limit(write)

    def read(self, ranks: Iterable[int]) -> dict[int, str] | None:
        """Return the published exit reasons of ``ranks``, or None if the store does not answer."""

        def read() -> dict[int, str]:
            keys = {rank: f"left/{rank}" for rank in ranks}
            left = {rank: key for rank, key in keys.items() if self._store.check([key])}
            return {rank: self._store.get(key).decode() for rank, key in left.items()}

        return self._within_limit(read)

    def any_published(self) -> bool:
        """Return True if a worker has published a reason. May be late. Never blocks."""
        return self._poll.found()

    def close(self) -> None:
        """Stop the background thread."""
        self._poll.close()

    def _within_limit(self, function: Callable[[], T]) -> T | None:
        """Return ``function()``, or None if the store does not answer within a second.

        After that, the store is not asked again.
        """
        if self._poll.store_lost:
            return None
        try:
            return call_within(_STORE_SECONDS, function)
        except RuntimeError:
            self._poll.store_lost = True
            return None
