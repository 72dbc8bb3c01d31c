"""Why workers have left, and that one has: a connection that is lost does not say."""

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeVar, cast

T = TypeVar("T")
Why = Literal["gave up", "failed"]
_ALARM = "alarm"  # key: somebody has left
_STORE_SECONDS = 1.0  # a store on a host that is cut off may take as long as it likes
_BETWEEN_SECONDS = 1.0  # between looks at the store in a long wait


class Departures:
    """What workers tell in the process group's store before they leave.

    One that was killed tells nothing, but whoever notices it does: "failed". Those who notice later
    do not take that one for the first, and those who wait for somebody who lives learn of it.

    Args:
        store: Keys of these workers alone.
        rank: This worker's.
    """

    def __init__(self, store: Any, rank: int) -> None:
        self._store, self._rank = store, rank
        self._gone = False  # the store, perhaps with the rank that kept it
        self._alarm = False
        self._looking: threading.Thread | None = None
        self._looked = time.monotonic()

    def tell(self, why: Why) -> None:
        """Say why this worker leaves. Everyone can read it afterwards."""

        def tell() -> bool:
            self._store.set(self._key(self._rank), why)
            self._store.set(_ALARM, "")
            return bool(self._store.check([_ALARM]))  # both have arrived

        self._promptly(tell)

    def told(self, ranks: Iterable[int]) -> dict[int, Why] | None:
        """What some of the ``ranks`` have said; None if that cannot be known."""

        def read() -> dict[int, Why]:
            keys = {rank: self._key(rank) for rank in ranks}
            left = [rank for rank, key in keys.items() if self._store.check([key])]
            return {rank: cast(Why, self._store.get(keys[rank]).decode()) for rank in left}

        return self._promptly(read)

    def look(self) -> bool:
        """Whether somebody is known to have left. Never blocks; looks once a second, if asked."""

        def look() -> None:
            try:
                self._alarm = bool(self._store.check([_ALARM]))
            except RuntimeError:
                self._gone = True

        now = time.monotonic()
        idle = self._looking is None or not self._looking.is_alive()
        if idle and not self._gone and now - self._looked > _BETWEEN_SECONDS:
            self._looked, self._looking = now, self._start(look)
        return self._alarm

    def close(self) -> None:
        """Let a look end: Python would abort with a thread inside the store."""
        if self._looking is not None:
            self._looking.join(_STORE_SECONDS)

    def _key(self, rank: int) -> str:
        return f"left/{rank}"

    def _promptly(self, function: Callable[[], T]) -> T | None:
        """What ``function`` gives; None if the store is gone."""
        results: list[T] = []

        def run() -> None:
            try:
                results.append(function())
            except RuntimeError:
                self._gone = True

        thread = None if self._gone else self._start(run)
        if thread is not None:
            thread.join(_STORE_SECONDS)
            self._gone = self._gone or thread.is_alive()
        return results[0] if results else None

    def _start(self, function: Callable[[], None]) -> threading.Thread | None:
        thread = threading.Thread(target=function, name="departures", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the interpreter is ending
            return None
        return thread
