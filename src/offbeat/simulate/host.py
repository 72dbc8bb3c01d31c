"""A simulated worker's clock and activities: virtual time."""

from collections.abc import Callable
from typing import Any, TypeVar

from typing_extensions import override

from offbeat.simulate.cluster import SimulatedCluster
from offbeat.simulate.kernel import Signal
from offbeat.transport.host import Host, Promise

T = TypeVar("T")
_POLLS = 100  # in a row, without virtual time passing: a loop that waits for done()
_SHORTEST_NAP_SECONDS = 1e-6
_LONGEST_NAP_SECONDS = 1e-3


class SimulatedPromise(Promise[Any]):
    """Fulfilled at one virtual moment.

    Attributes:
        signal: Happens then.
    """

    def __init__(self) -> None:
        self.signal = Signal()
        self._result: Any = None

    @override
    def fulfil(self, result: Any) -> None:
        self._result = result
        self.signal.fire()

    @property
    @override
    def fulfilled(self) -> bool:
        return self.signal.happened

    @property
    @override
    def result(self) -> Any:
        return self._result


class SimulatedHost(Host):
    """One worker in virtual time.

    Args:
        cluster: What the workers share.
        rank: This worker.

    Attributes:
        totals: What was given to ``watch``, for ``Simulation.stats``.
    """

    def __init__(self, cluster: SimulatedCluster, rank: int) -> None:
        self._cluster, self._rank, self.scale = cluster, rank, cluster.scale
        self.totals: list[Callable[[], object]] = []
        self._polls, self._asked_seconds, self._nap = 0, 0.0, _SHORTEST_NAP_SECONDS

    @override
    def now(self) -> float:
        return self._cluster.workers.kernel.now

    @override
    def sleep(self, seconds: float, what: str) -> None:
        self._cluster.nap(self._rank, seconds, what)

    @override
    def spawn(self, activity: Callable[[], None], *, what: str) -> None:
        self._cluster.workers.spawn(activity, what)

    @override
    def promise(self) -> Promise[Any]:
        return SimulatedPromise()

    @override
    def computed(self, progress: float) -> None:
        self._cluster.compute_step(self._rank, progress)

    @override
    def watch(self, totals: Callable[[], object]) -> None:
        self.totals.append(totals)

    def wait(self, signal: Signal, what: str) -> None:
        """Block this worker until ``signal``; virtual time passes."""
        self._cluster.wait(self._rank, signal, what)

    def polled(self, what: str) -> None:
        """``what`` was asked whether it is done, and is not.

        Asking takes no time. But a loop that asks until it is done must let time pass, or it would
        never be: after so many questions at one moment the worker sleeps, longer each time.
        """
        if self.now() > self._asked_seconds:
            self._polls, self._nap = 0, _SHORTEST_NAP_SECONDS
        self._polls += 1
        if self._polls == _POLLS:
            self._cluster.nap(self._rank, self._nap, what)
            self._polls, self._nap = 0, min(2 * self._nap, _LONGEST_NAP_SECONDS)
        self._asked_seconds = self.now()
