"""Detection that a view change is needed, without blocking the training."""

import time

from offbeat.elastic.heartbeats import HeartbeatConnections
from offbeat.elastic.store import SharedStore
from offbeat.transport.connections import close_at_exit
from offbeat.transport.store_poll import KeyPoll

_STORE_SECONDS = 1.0  # time between two looks at the store
_HEARTBEAT_SECONDS = 0.2  # time between two looks at the heartbeat connections


class ViewChangeDetector:
    """Detects a request for a view change in the store, and the death of a member.

    If the store is lost, training continues until a member dies.

    Args:
        store: Store of the training.
        key: Key that a worker writes to request a view change.
        heartbeats: Heartbeat connections of this process.
        members: Workers whose death needs a view change.
    """

    def __init__(
        self,
        store: SharedStore,
        key: str,
        heartbeats: HeartbeatConnections,
        members: frozenset[int],
    ) -> None:
        self._poll = KeyPoll(store.store, key, _STORE_SECONDS)
        self._heartbeats, self._members = heartbeats, members
        self._died = False
        self._last_look = time.monotonic()
        close_at_exit(self)

    def detected(self) -> bool:
        """Return True if a view change is known to be needed. Never blocks."""
        now = time.monotonic()
        if now - self._last_look > _HEARTBEAT_SECONDS:
            self._last_look = now
            self._died = self._died or bool(self._heartbeats.dead() & self._members)
        return self._poll.found() or self._died

    def close(self) -> None:
        """Stop polling the store."""
        self._poll.close()
