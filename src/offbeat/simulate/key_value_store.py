"""A key-value store of simulated workers, whose operations take virtual time."""

from collections.abc import Callable
from typing import TypeVar

from typing_extensions import override

from offbeat.simulate.cluster import SimulatedCluster
from offbeat.transport.key_value_store import KeyValueStore

T = TypeVar("T")


class SimulatedStore(KeyValueStore):
    """One worker's access to a store that is kept on a machine of its own.

    A request takes the latency of the network to reach the store, and the answer takes as long
    again. ``put`` has no answer. Bandwidths do not matter, because the messages are short.

    Args:
        cluster: The simulated cluster.
        rank: Rank of the worker.
        values: The values, which all workers share.
    """

    def __init__(self, cluster: SimulatedCluster, rank: int, values: KeyValueStore) -> None:
        self._cluster, self._rank, self._values = cluster, rank, values
        self._latency_seconds = float(cluster.network.latency)

    @override
    def add(self, key: str, amount: int) -> int:
        return self._answered(key, lambda: self._values.add(key, amount))

    @override
    def compare_set(self, key: str, expected: str, value: str) -> str:
        return self._answered(key, lambda: self._values.compare_set(key, expected, value))

    @override
    def get(self, key: str) -> str:
        return self._answered(key, lambda: self._values.get(key))

    @override
    def put(self, key: str, value: str) -> None:
        self._travel(key)
        self._values.put(key, value)

    def _answered(self, key: str, operation: Callable[[], T]) -> T:
        self._travel(key)
        answer = operation()
        self._travel(key)
        return answer

    def _travel(self, key: str) -> None:
        self._cluster.idle(self._rank, self._latency_seconds, f"the store for {key}")
