"""Whether a view change is wanted, looked up beside the training."""

import threading
import time

from offbeat.elastic.heartbeats import Lifelines
from offbeat.elastic.store import Board
from offbeat.transport.connections import close_at_exit

_STORE_SECONDS = 1.0  # between looks at the store, and how long the last one may take to end
_LIFELINES_SECONDS = 0.2  # between looks at the connections


class Watch:
    """Looks for a key in the store, and for the death of a worker.

    Args:
        board: It holds the key.
        key: Written by whoever wants a view change.
        lifelines: To the workers.
        workers: Those whose death wants one.
    """

    def __init__(
        self, board: Board, key: str, lifelines: Lifelines, workers: frozenset[int]
    ) -> None:
        self._board, self._key = board, key
        self._lifelines, self._workers = lifelines, workers
        self._wanted = False
        self._gone = False  # the store: training goes on until somebody is lost
        self._looking: threading.Thread | None = None
        self._looked = self._polled = time.monotonic()
        close_at_exit(self)

    def look(self) -> bool:
        """Whether one is wanted, as far as is known. Never blocks."""
        now = time.monotonic()
        if now - self._polled > _LIFELINES_SECONDS:
            self._polled = now
            self._wanted = self._wanted or bool(self._lifelines.lost() & self._workers)
        idle = self._looking is None or not self._looking.is_alive()
        if idle and not self._gone and now - self._looked > _STORE_SECONDS:
            self._looked = now
            self._looking = threading.Thread(target=self._ask, name="view change", daemon=True)
            self._looking.start()
        return self._wanted

    def close(self) -> None:
        """Let the last look end."""
        self._gone = True
        if self._looking is not None:
            self._looking.join(_STORE_SECONDS)

    def _ask(self) -> None:
        try:
            self._wanted = self._wanted or self._board.get(self._key) is not None
        except RuntimeError:
            self._gone = True
