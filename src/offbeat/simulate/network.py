"""The network of a simulated cluster: links, and the durations of messages and collectives.

Symbols: latency α in seconds, bandwidth B in bytes per second, tensor size M in bytes, number of
workers N. Adding tensors takes no time. Sources of the formulas:

* Messages, α + M/B each: Hockney, "The communication challenge for MPP", Parallel Computing
  20(3), 1994.
* All-reduce: Patarasuk & Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
  workstations", JPDC 69(2), 2009. They show that no all-reduce sends fewer bytes than the ring.
* Broadcast: Thakur, Rabenseifner & Gropp, "Optimization of collective communication operations in
  MPICH", IJHPCA 19(1), 2005.
* All-gather and all-to-all: all messages are sent at the same time, as in gloo's all-to-all and in
  grouped messages of NCCL.
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from offbeat.arguments import require_integer, require_mapping
from offbeat.units import to_bandwidth, to_seconds

NODE_BANDWIDTH, NODE_LATENCY = "100Gbit/s", "10us"
"""Default bandwidth and latency of the network between the processes of one node (machine)."""

CollectiveKind = Literal["reduce", "broadcast", "gather", "exchange"]
"""The kinds are, in this order: all-reduce, broadcast, all-gather, all-to-all."""


def seconds_at(
    kind: CollectiveKind,
    size_bytes: float,
    workers: int,
    bytes_per_second: float,
    latency_seconds: float,
) -> float:
    """Return the duration of a collective in which each flow has B bytes per second.

    * All-reduce: 2(N−1)·(α + M/(N·B)). A ring does N−1 steps of reduce-scatter and N−1 steps of
      all-gather. In each step every worker sends one N-th of the tensor.
    * Broadcast: ⌈log₂ N⌉·(α + M/B). In each step of a binomial tree every worker that has the
      tensor sends it to one that lacks it, until all have it.
    * All-gather: α + (N−1)·M/B. Every worker sends its tensor to all others at the same time.
    * All-to-all: α + (N−1)·M/(N·B). Every worker sends M/N bytes to each of the others at the same
      time.

    With one worker the duration is 0.
    """
    if workers == 1:
        return 0.0
    match kind:
        case "reduce":
            chunk_bytes = size_bytes / workers
            return 2 * (workers - 1) * (latency_seconds + chunk_bytes / bytes_per_second)
        case "broadcast":
            rounds = (workers - 1).bit_length()
            return rounds * (latency_seconds + size_bytes / bytes_per_second)
        case "gather":
            return latency_seconds + (workers - 1) * size_bytes / bytes_per_second
        case "exchange":
            part_bytes = size_bytes / workers
            return latency_seconds + (workers - 1) * part_bytes / bytes_per_second


def sent_bytes(kind: CollectiveKind, size_bytes: float, workers: int) -> float:
    """Return the bytes that a worker sends in a collective, as the mean over the workers.

    These are 2(N−1)/N·M in an all-reduce, (N−1)·M in an all-gather, and (N−1)/N·M in a broadcast
    and an all-to-all.
    """
    match kind:
        case "reduce":
            return 2 * (workers - 1) / workers * size_bytes
        case "gather":
            return (workers - 1) * size_bytes
        case "broadcast" | "exchange":
            return (workers - 1) / workers * size_bytes


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
        # A ring enters and leaves a node once, so it has one flow over the link of a node. In the
        # other collectives each worker of a node has one.
        ring = kind == "reduce"
        flows = 1 if ring else max(Counter(map(self.node, ranks)).values(), default=1)
        rate = self.collective_bytes_per_second(ranks, flows=flows, sharing=sharing)
        return seconds_at(kind, size_bytes, len(ranks), rate, self.latency_of(ranks))


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
