"""Exit reasons: a worker that leaves publishes the reason, which a lost connection cannot tell."""

from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeVar, cast

from offbeat.transport.torch_backend.store_access import KeyPoll, call_within

T = TypeVar("T")
ExitReason = Literal["gave up", "failed"]
_ALARM = "alarm"  # key that exists once any worker has published a reason
_STORE_SECONDS = 1.0  # time limit of an access to the store
_POLL_SECONDS = 1.0  # time between two checks of the alarm


class ExitReasons:
    """The exit reasons of the workers of one communicator, in the store of their process group.

    A worker that closes before the others and without a failure publishes "gave up". A worker whose
    operation failed publishes "failed". A killed worker, and one that closes together with all
    others, publishes nothing. The reasons have two uses:

    * When one worker is lost, operations fail on all others. An error can name the worker that was
      lost first: only the others publish "failed".
    * A worker that waits for a healthy worker learns that a third worker has left or failed.

    Args:
        store: Store of ``torch.distributed`` that only these workers use, for this purpose only.
        rank: Rank of this worker.
    """

    def __init__(self, store: Any, rank: int) -> None:
        self._store, self._rank = store, rank
        self._poll = KeyPoll(store, _ALARM, _POLL_SECONDS)

    def publish(self, reason: ExitReason) -> None:
        """Publish the exit reason of this worker, if the store answers within about a second."""

        def write() -> bool:
            self._store.set(self._key(self._rank), reason)
            self._store.set(_ALARM, "")
            return bool(self._store.check([_ALARM]))  # waits until both writes have arrived

        self._within_limit(write)

    def read(self, ranks: Iterable[int]) -> dict[int, ExitReason] | None:
        """Return the exit reasons of those ``ranks`` that have published one.

        Returns None if the store does not answer.
        """

        def read() -> dict[int, ExitReason]:
            keys = {rank: self._key(rank) for rank in ranks}
            return {
                rank: cast(ExitReason, self._store.get(key).decode())
                for rank, key in keys.items()
                if self._store.check([key])
            }

        return self._within_limit(read)

    def any_published(self) -> bool:
        """Return True if a worker has published a reason. Never blocks.

        A background thread asks the store at most once a second, so the answer may be late.
        """
        return self._poll.found()

    def close(self) -> None:
        """Stop the background thread."""
        self._poll.close()

    def _key(self, rank: int) -> str:
        return f"left/{rank}"

    def _within_limit(self, function: Callable[[], T]) -> T | None:
        """Return ``function()``, or None if the store does not answer within a second.

        A store that has not answered counts as lost and is not asked again.
        """
        if self._poll.store_lost:
            return None
        try:
            return call_within(_STORE_SECONDS, function)
        except RuntimeError:
            self._poll.store_lost = True
            return None
