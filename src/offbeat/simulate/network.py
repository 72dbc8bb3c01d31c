"""The network of a simulated cluster: links, and the durations of messages and collectives.

The durations follow the formulas of ``transport/costs.py``. They use these symbols: latency α in
seconds, bandwidth B in bytes per second, tensor size M in bytes. One message takes α + M/B.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from offbeat.arguments import require_integer, require_mapping
from offbeat.transport.costs import (
    NODE_BANDWIDTH,
    NODE_LATENCY,
    all_gather_bytes,
    all_gather_seconds,
    all_reduce_bytes,
    all_reduce_seconds,
    all_to_all_bytes,
    all_to_all_seconds,
    broadcast_bytes,
    broadcast_seconds,
)
from offbeat.units import to_bandwidth, to_seconds

CollectiveKind = Literal["reduce", "broadcast", "gather", "exchange"]
"""The kinds are, in this order: all-reduce, broadcast, all-gather, all-to-all."""


class _Formulas(NamedTuple):
    """Costs of one kind of collective.

    Attributes:
        seconds: Duration, as a function of M, number of workers, B and α.
        sent_bytes: Bytes sent by each worker, as a function of M and number of workers.
        direct: True if every worker of a node sends to other nodes. False for a ring: only one
            worker of a node sends to the next node.
    """

    seconds: Callable[[float, int, float, float], float]
    sent_bytes: Callable[[float, int], float]
    direct: bool


_COLLECTIVES: dict[CollectiveKind, _Formulas] = {
    "reduce": _Formulas(all_reduce_seconds, all_reduce_bytes, direct=False),
    "broadcast": _Formulas(broadcast_seconds, broadcast_bytes, direct=True),
    "gather": _Formulas(all_gather_seconds, all_gather_bytes, direct=True),
    "exchange": _Formulas(all_to_all_seconds, all_to_all_bytes, direct=True),
}


def sent_bytes(kind: CollectiveKind, size_bytes: float, workers: int) -> float:
    """Return the bytes that a worker sends in a collective, as the mean over the workers."""
    return _COLLECTIVES[kind].sent_bytes(size_bytes, workers)


@dataclass(frozen=True, init=False)
class Network:
    """Workers, or nodes of several workers, on full-duplex links to one switch.

    Example: ``Network("5Gbit/s", latency="50us")``. A bandwidth is text or bits per second, a
    latency is text or seconds. The attributes hold the numbers.

    The slowest link of its workers determines the speed of a collective.

    **Nodes.** With ``workers_per_node=4``, ranks 0 to 3 are one node, ranks 4 to 7 another, and so
    on. A node has one link to the switch, shared by its workers. Inside the node each worker has
    its own link. An all-reduce over several nodes is a ring, which enters and leaves each node
    once. It therefore has the full link of the node. In an all-gather, an all-to-all and a
    broadcast the workers of a node share the link.

    Args:
        bandwidth: Bandwidth of every link to the switch, in each direction. If ``upload`` is given,
            only the bandwidth from the switch to the worker.
        latency: Latency α from the start of a message to the arrival of its first byte (≥ 0). With
            nodes, it holds for messages between nodes.
        upload: Bandwidth from the worker to the switch; None means ``bandwidth``.
        per_worker: Bandwidth of the links of some workers, by rank, in both directions. It replaces
            ``bandwidth`` and ``upload``. Requires ``workers_per_node=1``.
        workers_per_node: Number of workers per node (≥ 1).
        inside: Bandwidth of each worker's link inside its node, in each direction; None means
            "100Gbit/s". Requires nodes of several workers.
        inside_latency: Latency inside a node (≥ 0); None means "10us". Requires nodes of several
            workers.
        per_worker_changes: Values that replace those of ``per_worker``, by the virtual time (the
            simulator's clock) from which they hold and by rank: ``{"20s": {3: "10Mbit/s"}}``.
            Transfers that have started keep their speed. Requires ``workers_per_node=1``.

    Raises:
        TypeError: An argument is neither text nor a number, or a rank is not an int.
        ValueError: A unit is unknown, a number is out of its range, a rank is negative, or
            arguments cannot be combined.
    """

    bandwidth: float
    latency: float
    upload: float | None
    per_worker: dict[int, float] = field(hash=False)
    workers_per_node: int
    inside: float | None
    inside_latency: float | None
    per_worker_changes: dict[float, dict[int, float]] = field(hash=False)

    def __init__(
        self,
        bandwidth: str | float,
        latency: str | float = "100us",
        *,
        upload: str | float | None = None,
        per_worker: Mapping[int, str | float] = {},
        workers_per_node: int = 1,
        inside: str | float | None = None,
        inside_latency: str | float | None = None,
        per_worker_changes: Mapping[str | float, Mapping[int, str | float]] = {},
    ) -> None:
        require_integer("workers_per_node", workers_per_node, least=1)
        inside_link = _inside_link(workers_per_node, inside, inside_latency)
        links = _read_links("per_worker", per_worker)
        require_mapping("per_worker_changes", per_worker_changes)
        later = {
            to_seconds(seconds, allow_zero=True): _read_links("per_worker_changes", bandwidths)
            for seconds, bandwidths in per_worker_changes.items()
        }
        for name, given in (("per_worker", links), ("per_worker_changes", later)):
            if given and workers_per_node > 1:
                raise ValueError(
                    f"{name} with workers_per_node: workers of a node share its link; leave one out"
                )
        values: dict[str, object] = {
            "bandwidth": to_bandwidth(bandwidth),
            "latency": to_seconds(latency, allow_zero=True),
            "upload": None if upload is None else to_bandwidth(upload),
            "per_worker": links,
            "workers_per_node": workers_per_node,
            "inside": None if inside_link is None else inside_link[0],
            "inside_latency": None if inside_link is None else inside_link[1],
            "per_worker_changes": {seconds: later[seconds] for seconds in sorted(later)},
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def at(self, seconds: float) -> "Network":
        """Return the network with the bandwidths that hold at virtual time ``seconds``."""
        if not self.per_worker_changes:
            return self
        links = dict(self.per_worker)
        for since, bandwidths in self.per_worker_changes.items():
            if since <= seconds:
                links.update(bandwidths)
        return replace(self, per_worker=links, per_worker_changes={})

    def ranks(self) -> set[int]:
        """Return the ranks named in ``per_worker`` and ``per_worker_changes``."""
        return {*self.per_worker}.union(*self.per_worker_changes.values())

    def node(self, rank: int) -> int:
        """Return the number of the node of worker ``rank``."""
        return rank // self.workers_per_node

    def crosses(self, ranks: Collection[int]) -> bool:
        """Return True if traffic between ``ranks`` leaves a node, or if nodes have one worker."""
        return self.workers_per_node == 1 or len({self.node(rank) for rank in ranks}) > 1

    def up(self, rank: int) -> float:
        """Return the bytes per second from worker ``rank``, or from its node, to the switch."""
        usual = self.bandwidth if self.upload is None else self.upload
        return self.per_worker.get(rank, usual) / 8

    def down(self, rank: int) -> float:
        """Return the bytes per second from the switch to worker ``rank``, or to its node."""
        return self.per_worker.get(rank, self.bandwidth) / 8

    def collective_bytes_per_second(
        self, ranks: Collection[int], *, flows: int = 1, sharing: int = 1
    ) -> float:
        """Return B, the bytes per second of one flow (stream of data) of a collective of ``ranks``.

        Inside one node, B is the bandwidth of the links inside. Between nodes, B is the minimum of

        * the bandwidths of the links of these nodes, divided by ``flows · sharing``, and
        * the bandwidth of the links inside, if a node contains several of ``ranks``.

        Args:
            ranks: Ranks of the workers.
            flows: Concurrent flows of the collective over the link of a node, in each direction.
            sharing: Number of such collectives that use the links of the nodes at the same time.
        """
        if not ranks or len(set(ranks)) != len(ranks):
            raise ValueError(f"a collective needs distinct ranks, got {list(ranks)}")
        if not self.crosses(ranks):
            return self._inside_rate
        rates = [min(self.up(rank), self.down(rank)) / (flows * sharing) for rank in ranks]
        if len({self.node(rank) for rank in ranks}) < len(ranks):
            rates.append(self._inside_rate)
        return min(rates)

    def link_seconds(self, size_bytes: float, source: int, destination: int) -> tuple[float, float]:
        """Return the seconds for which a message occupies the sender's and the receiver's link.

        For a message of M bytes these times are M/up(source) and M/down(destination), without the
        latency. Inside a node both times are M divided by the bandwidth of the links inside.
        """
        if source == destination:
            return 0.0, 0.0
        if not self.crosses((source, destination)):
            return size_bytes / self._inside_rate, size_bytes / self._inside_rate
        return size_bytes / self.up(source), size_bytes / self.down(destination)

    @property
    def _inside_rate(self) -> float:
        """Bytes per second of a worker's link inside its node; infinite without nodes."""
        return math.inf if self.inside is None else self.inside / 8

    def latency_of(self, ranks: Collection[int]) -> float:
        """Return the latency α of a message between ``ranks``, in seconds."""
        if self.crosses(ranks) or self.inside_latency is None:
            return self.latency
        return self.inside_latency

    def collective_seconds(
        self, kind: CollectiveKind, size_bytes: float, ranks: Collection[int], sharing: int = 1
    ) -> float:
        """Return the duration of a collective of ``ranks``, in seconds.

        Args:
            kind: Kind of the collective.
            size_bytes: Size M of the tensor of each worker.
            ranks: Ranks of the workers.
            sharing: Number of such collectives that use the links of the nodes at the same time.
        """
        formula, _, direct = _COLLECTIVES[kind]
        # A ring has one flow over the link of a node. Otherwise each worker of a node has one.
        flows = max(Counter(map(self.node, ranks)).values(), default=1) if direct else 1
        rate = self.collective_bytes_per_second(ranks, flows=flows, sharing=sharing)
        return formula(size_bytes, len(ranks), rate, self.latency_of(ranks))


def _read_links(name: str, bandwidths: Mapping[int, str | float]) -> dict[int, float]:
    require_mapping(name, bandwidths)
    for rank in bandwidths:
        require_integer(f"a rank in {name}", rank, least=0)
    return {rank: to_bandwidth(bandwidths[rank]) for rank in sorted(bandwidths)}


def _inside_link(
    workers: int, bandwidth: str | float | None, latency: str | float | None
) -> tuple[float, float] | None:
    """Return bandwidth and latency inside a node; None if it has one worker."""
    if workers == 1:
        for name, given in (("inside", bandwidth), ("inside_latency", latency)):
            if given is not None:
                raise ValueError(f"{name} needs nodes of several workers: give workers_per_node")
        return None
    return (
        to_bandwidth(NODE_BANDWIDTH if bandwidth is None else bandwidth),
        to_seconds(NODE_LATENCY if latency is None else latency, allow_zero=True),
    )
