"""The clock and the background threads of one simulated worker."""

from collections.abc import Callable
from typing import Any

from typing_extensions import override

from offbeat.simulate.cluster import SimulatedCluster
from offbeat.simulate.kernel import Signal
from offbeat.transport.host import Host, Promise

_POLLS = 100  # polls at the same virtual time after which the worker sleeps
_SHORTEST_SLEEP_SECONDS = 1e-6
_LONGEST_SLEEP_SECONDS = 1e-3


class SimulatedPromise(Promise[Any]):
    """A result that one thread of a simulated worker passes to another.

    Attributes:
        signal: Fires when the promise is fulfilled.
    """

    def __init__(self, host: "SimulatedHost") -> None:
        super().__init__()
        self._host, self.signal = host, Signal()

    @override
    def fulfil(self, result: Any) -> None:
        super().fulfil(result)
        self.signal.fire()

    @override
    def wait(self, seconds: float, what: str) -> bool:
        self._host.wait(self.signal, what)
        return True


class SimulatedHost(Host):
    """Clock and background threads of one simulated worker."""

    def __init__(self, cluster: SimulatedCluster, rank: int) -> None:
        self._cluster, self._rank = cluster, rank
        self._polls, self._polled_seconds, self._sleep_seconds = 0, 0.0, _SHORTEST_SLEEP_SECONDS

    @override
    def now(self) -> float:
        return self._cluster.workers.kernel.now

    @override
    def sleep(self, seconds: float, what: str) -> None:
        self._cluster.idle(self._rank, seconds, what)

    @override
    def spawn(self, activity: Callable[[], None], *, what: str) -> None:
        self._cluster.workers.spawn(activity, what)

    @property
    @override
    def in_background(self) -> bool:
        return self._cluster.workers.current.background

    @override
    def promise(self) -> Promise[Any]:
        return SimulatedPromise(self)

    @override
    def computed(self, progress: float) -> None:
        self._cluster.compute_step(self._rank, progress)

    @override
    def register_totals(self, totals: Callable[[], object]) -> None:
        self._cluster.totals[self._rank] = totals

    def wait(self, signal: Signal, what: str) -> None:
        """Block this worker until ``signal`` fires."""
        self._cluster.wait(self._rank, signal, what)

    def polled(self, what: str) -> None:
        """Count a poll of the unfinished operation ``what``. Every 100th poll sleeps.

        A poll itself takes no virtual time. Without the sleep, a loop that polls until the
        operation ends would never end. The first sleep takes 1 µs, each further one twice as long,
        up to 1 ms. If virtual time has passed since the last poll, counting starts again, and the
        next sleep takes 1 µs.
        """
        if self.now() > self._polled_seconds:
            self._polls, self._sleep_seconds = 0, _SHORTEST_SLEEP_SECONDS
        self._polls += 1
        if self._polls == _POLLS:
            self._cluster.idle(self._rank, self._sleep_seconds, what)
            self._polls = 0
            self._sleep_seconds = min(2 * self._sleep_seconds, _LONGEST_SLEEP_SECONDS)
        self._polled_seconds = self.now()
