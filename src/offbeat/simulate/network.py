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
from collections.abc import Callable, Collection, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Literal

from offbeat.arguments import require_integer
from offbeat.units import to_bandwidth, to_seconds

NODE_BANDWIDTH, NODE_LATENCY = "100Gbit/s", "10us"
"""Default bandwidth and latency of the network between the processes of one node (machine)."""

CollectiveKind = Literal["reduce", "broadcast", "gather", "exchange"]
"""The kinds are, in this order: all-reduce, broadcast, all-gather, all-to-all."""


def cost(
    kind: CollectiveKind, size: float, workers: int, rate: float, latency: float
) -> tuple[float, float]:
    """Return the seconds of a collective and the mean number of bytes that a worker sends.

    Both are 0 with one worker.

    ==========  =======================  ===========  ============================================
    collective  seconds                  bytes sent   messages
    ==========  =======================  ===========  ============================================
    all-reduce  2(N−1)·(α + M/(N·B))     2(N−1)/N·M   ring: N−1 steps of reduce-scatter and N−1 of
                                                      all-gather, with an N-th of the tensor each
    broadcast   ⌈log₂ N⌉·(α + M/B)       (N−1)/N·M    binomial tree: in each step every worker that
                                                      has the tensor sends it to one that lacks it
    all-gather  α + (N−1)·M/B            (N−1)·M      each tensor to all others at the same time
    all-to-all  α + (N−1)·M/(N·B)        (N−1)/N·M    M/N to each of the others at the same time
    ==========  =======================  ===========  ============================================

    Args:
        kind: Kind of the collective.
        size: Size M of the tensor of each worker, bytes.
        workers: Number of workers N.
        rate: Bytes per second B of each flow (stream of data).
        latency: Latency α, seconds.
    """
    if workers == 1:
        return 0.0, 0.0
    others, part = workers - 1, size / workers
    match kind:
        case "reduce":
            return 2 * others * (latency + part / rate), 2 * others / workers * size
        case "broadcast":
            return others.bit_length() * (latency + size / rate), others / workers * size
        case "gather":
            return latency + others * size / rate, others * size
        case "exchange":
            return latency + others * part / rate, others / workers * size


@dataclass(frozen=True)
class Network:
    """Workers, or nodes of several workers, on full-duplex links to one switch.

    Example: ``Network("5Gbit/s", latency="50us")``. A bandwidth is text or bits per second, a
    latency is text or seconds.

    The slowest link of its workers determines the speed of a collective.

    **Nodes.** With ``workers_per_node=4``, ranks 0 to 3 are one node, ranks 4 to 7 another, and so
    on. A node has one link to the switch, shared by its workers. Inside the node each worker has
    its own link. An all-reduce over several nodes is a ring, which enters and leaves each node
    once. It therefore has the full link of the node. In an all-gather, an all-to-all and a
    broadcast the workers of a node share the link.

    Args:
        bandwidth: Bandwidth of every link to the switch, in each direction. It may be a function
            of the number of the worker (with nodes: of the node) and the virtual time in seconds.
            ``lambda worker, seconds: "10Mbit/s" if worker == 3 else "1Gbit/s"`` gives worker 3 a
            slow link. Transfers that have started keep their speed.
        latency: Latency α from the start of a message to the arrival of its first byte (≥ 0). With
            nodes, it holds for messages between nodes.
        workers_per_node: Number of workers per node (≥ 1).
        inside: Bandwidth of each worker's link inside its node, in each direction; None means
            "100Gbit/s". Requires nodes of several workers.
        inside_latency: Latency inside a node (≥ 0); None means "10us". Requires nodes of several
            workers.

    Raises:
        TypeError: An argument is neither text nor a number.
        ValueError: A unit is unknown, a number is out of its range, or ``inside`` or
            ``inside_latency`` is given without nodes.
    """

    bandwidth: str | float | Callable[[int, float], str | float]
    latency: str | float = "100us"
    _: KW_ONLY
    workers_per_node: int = 1
    inside: str | float | None = None
    inside_latency: str | float | None = None

    def __post_init__(self) -> None:
        require_integer("workers_per_node", self.workers_per_node, least=1)
        numbers = {"latency": to_seconds(self.latency, allow_zero=True)}
        if not callable(self.bandwidth):
            numbers["bandwidth"] = to_bandwidth(self.bandwidth)
        if self.workers_per_node > 1:
            inside = NODE_BANDWIDTH if self.inside is None else self.inside
            latency = NODE_LATENCY if self.inside_latency is None else self.inside_latency
            numbers["inside"] = to_bandwidth(inside)
            numbers["inside_latency"] = to_seconds(latency, allow_zero=True)
        elif self.inside is not None or self.inside_latency is not None:
            name = "inside_latency" if self.inside is None else "inside"
            raise ValueError(f"{name} needs nodes of several workers: give workers_per_node")
        for name, number in numbers.items():
            object.__setattr__(self, name, number)

    def node(self, rank: int) -> int:
        """Return the number of the node of worker ``rank``."""
        return rank // self.workers_per_node

    def crosses(self, ranks: Collection[int]) -> bool:
        """Return True if traffic between ``ranks`` leaves a node, or if nodes have one worker."""
        return self.workers_per_node == 1 or len({self.node(rank) for rank in ranks}) > 1

    def bits_per_second(self, rank: int, now: float) -> float:
        """Return the bandwidth of the link of worker ``rank``, or of its node, to the switch."""
        if callable(self.bandwidth):
            return to_bandwidth(self.bandwidth(self.node(rank), now))
        return float(self.bandwidth)

    def message_seconds(
        self, size_bytes: float, source: int, destination: int, now: float
    ) -> tuple[float, float, float]:
        """Return how long a message occupies the links of sender and receiver, and its latency.

        For a message of M bytes the first two are M/B with the bandwidths of the two links. All
        three are 0 if a worker sends to itself.
        """
        if source == destination:
            return 0.0, 0.0, 0.0
        if not self.crosses((source, destination)):
            rate, latency = self._inside
            return size_bytes / rate, size_bytes / rate, latency
        sending, receiving = (
            size_bytes / (self.bits_per_second(rank, now) / 8) for rank in (source, destination)
        )
        return sending, receiving, float(self.latency)

    def collective_cost(
        self,
        kind: CollectiveKind,
        size_bytes: float,
        ranks: Sequence[int],
        sharing: int,
        now: float,
    ) -> tuple[float, float]:
        """Return the seconds of a collective of ``ranks``, and the bytes that a worker sends.

        Inside one node, B is the bandwidth of the links inside. Between nodes, B is the minimum of

        * the bandwidths of the links of these nodes, divided by the number of flows (streams of
          data) over the link of a node, and
        * the bandwidth of the links inside, if a node contains several of ``ranks``.

        Args:
            kind: Kind of the collective.
            size_bytes: Size M of the tensor of each worker, bytes.
            ranks: Ranks of the workers.
            sharing: Number of such collectives that use the links of the nodes at the same time.
            now: Virtual time at which the collective starts.
        """
        rate, latency = self._inside
        if self.crosses(ranks):
            in_node = max(Counter(map(self.node, ranks)).values())
            # A ring enters and leaves a node once, so it has one flow over the link of a node. In
            # the other collectives each worker of a node has one.
            flows = sharing * (1 if kind == "reduce" else in_node)
            between = min(self.bits_per_second(rank, now) / 8 / flows for rank in ranks)
            rate = min(between, rate) if in_node > 1 else between
            latency = float(self.latency)
        return cost(kind, size_bytes, len(ranks), rate, latency)

    @property
    def _inside(self) -> tuple[float, float]:
        """Bytes per second and latency of the links inside a node, in nodes of several workers."""
        return float(self.inside or math.inf) / 8, float(self.inside_latency or 0.0)
