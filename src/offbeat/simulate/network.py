"""The network of a simulated cluster: the links to which the formulas of ``costs`` are applied."""

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from offbeat.arguments import POSITIVE, require_integer, require_mapping, require_number
from offbeat.transport.costs import (
    USUAL_INSIDE,
    USUAL_INSIDE_LATENCY,
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    broadcast_seconds,
    message_seconds,
    reduce_seconds,
)
from offbeat.units import show_bandwidth, show_seconds, to_bandwidth, to_seconds


@dataclass(frozen=True, init=False, repr=False)
class Network:
    """Workers on full-duplex links to one switch, every message delayed by one latency.

    ``Network("5Gbit/s", latency="50us")``. A bandwidth is text or bits a second, a latency text or
    seconds; the attributes hold the numbers.

    The slowest of the links taking part sets the pace of a collective. With ``switch``, its N
    concurrent flows get switch/N each, also in the rounds of a tree that has fewer.

    With ``workers_per_node`` L, ranks 0 to L − 1 are one node, the next L another, and so on. A
    node has one link to the switch, which its workers share, and inside each worker has one of its
    own. A ring over workers of several nodes enters and leaves each node once, and has all of the
    link; in an all-to-all, and a broadcast, the workers of a node use it at once.

    Args:
        bandwidth: Of every link in each direction; with ``upload``, towards the worker.
        latency: α, from the start of a message to its first byte (≥ 0).
        upload: From the worker towards the switch, where it differs from ``bandwidth``.
        per_worker: Rank → bandwidth in both directions of that worker's link, instead of
            ``bandwidth`` and ``upload``. Not with nodes of several workers.
        switch: What the switch carries in total, shared by all flows at once; None: no limit.
        workers_per_node: L (≥ 1).
        inside: Of each worker's link inside its node, in each direction; None is "100Gbit/s". Only
            with nodes of several workers.
        inside_latency: α there (≥ 0); None is "10us". Likewise.
        changes: Seconds → factor: from then on all bandwidths but ``inside`` are what is given here
            times that, as in ``{"20s": 0.5}``. What has begun goes on as it began.

    Raises:
        TypeError: an argument that is neither text nor a number, or a rank that is no int.
        ValueError: a wrong unit, a number that is not positive and finite, a negative rank, or
            what needs nodes without them, or cannot be with them.
    """

    bandwidth: float
    latency: float
    upload: float | None
    per_worker: dict[int, float] = field(hash=False)
    switch: float | None
    workers_per_node: int
    inside: float | None
    inside_latency: float | None
    changes: dict[float, float] = field(hash=False)

    def __init__(
        self,
        bandwidth: str | float,
        latency: str | float = "100us",
        *,
        upload: str | float | None = None,
        per_worker: Mapping[int, str | float] = {},
        switch: str | float | None = None,
        workers_per_node: int = 1,
        inside: str | float | None = None,
        inside_latency: str | float | None = None,
        changes: Mapping[str | float, float] = {},
    ) -> None:
        require_integer("workers_per_node", workers_per_node, least=1)
        within = _inside(workers_per_node, inside, inside_latency)
        require_mapping("per_worker", per_worker)
        for rank in per_worker:
            require_integer("a rank in per_worker", rank, least=0)
        if per_worker and workers_per_node > 1:
            raise ValueError(
                "per_worker with workers_per_node: workers of a node share its link; leave one out"
            )
        require_mapping("changes", changes)
        then = {to_seconds(seconds): value for seconds, value in changes.items()}
        for factor in then.values():
            require_number("a factor in changes", factor, POSITIVE)
        values: dict[str, object] = {
            "bandwidth": to_bandwidth(bandwidth),
            "latency": to_seconds(latency, allow_zero=True),
            "upload": None if upload is None else to_bandwidth(upload),
            "per_worker": {rank: to_bandwidth(per_worker[rank]) for rank in sorted(per_worker)},
            "switch": None if switch is None else to_bandwidth(switch),
            "workers_per_node": workers_per_node,
            "inside": None if within is None else within[0],
            "inside_latency": None if within is None else within[1],
            "changes": {seconds: then[seconds] for seconds in sorted(then)},
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def at(self, seconds: float) -> "Network":
        """What it is from then on if nothing changes any more."""
        if not self.changes:
            return self
        factor = 1.0
        for since, value in self.changes.items():
            if since <= seconds:
                factor = value
        return Network(
            self.bandwidth * factor,
            self.latency,
            upload=None if self.upload is None else self.upload * factor,
            per_worker={rank: value * factor for rank, value in self.per_worker.items()},
            switch=None if self.switch is None else self.switch * factor,
            workers_per_node=self.workers_per_node,
            inside=self.inside,
            inside_latency=self.inside_latency,
        )

    def node(self, rank: int) -> int:
        """The number of the worker's node."""
        return rank // self.workers_per_node

    def crosses(self, ranks: Collection[int]) -> bool:
        """Whether what goes on between these workers leaves a node; one alone counts as a node."""
        return self.workers_per_node == 1 or len({self.node(rank) for rank in ranks}) > 1

    def up(self, rank: int) -> float:
        """Bytes a second from worker ``rank``, or its node, to the switch."""
        everyone = self.bandwidth if self.upload is None else self.upload
        return self.per_worker.get(rank, everyone) / 8

    def down(self, rank: int) -> float:
        """Bytes a second from the switch to worker ``rank``, or its node."""
        return self.per_worker.get(rank, self.bandwidth) / 8

    def collective_bytes_per_second(
        self, ranks: Collection[int], *, flows: int = 1, sharing: int = 1
    ) -> float:
        """B of a collective of ``ranks``.

        Inside one node that of its links. Else the least of the links of its workers or their
        nodes, shared by ``flows · sharing``, of switch/(N · flows · sharing) and, where a node has
        several of the workers, of ``inside``.

        Args:
            ranks: They.
            flows: Of it over the link of a node at once, each way.
            sharing: How many such collectives use the links at the same time.

        Raises:
            ValueError: no rank, or one of them twice.
        """
        if not ranks or len(set(ranks)) != len(ranks):
            raise ValueError(f"a collective needs distinct ranks, got {list(ranks)}")
        if not self.crosses(ranks):
            return self._inside_rate
        together = flows * sharing
        nodes = {self.node(rank) for rank in ranks}
        rates = [min(self.up(rank), self.down(rank)) / together for rank in ranks]
        if self.switch is not None:
            rates.append(self.switch / 8 / (len(nodes) * together))
        if len(nodes) < len(ranks):
            rates.append(self._inside_rate)
        return min(rates)

    def message_seconds(self, size_bytes: float, source: int, destination: int) -> float:
        """α + M/min(up(source), down(destination), switch); 0 from a worker to itself.

        Between workers of one node α + M/B of its links.
        """
        if source == destination:
            return 0.0
        rate = self._inside_rate
        if self.crosses((source, destination)):
            rate = min(self.up(source), self.down(destination))
            if self.switch is not None:
                rate = min(rate, self.switch / 8)
        return message_seconds(size_bytes, rate, self.latency_of((source, destination)))

    def link_seconds(self, size_bytes: float, source: int, destination: int) -> tuple[float, float]:
        """How long a message keeps the sender's and the receiver's link busy.

        M/min(up(source), switch) and M/min(down(destination), switch), without the latency; 0 from
        a worker to itself, M/B of the node's links inside a node.
        """
        if source == destination:
            return 0.0, 0.0
        if not self.crosses((source, destination)):
            return size_bytes / self._inside_rate, size_bytes / self._inside_rate
        switch = math.inf if self.switch is None else self.switch / 8
        up, down = min(self.up(source), switch), min(self.down(destination), switch)
        return size_bytes / up, size_bytes / down

    @property
    def _inside_rate(self) -> float:
        """Bytes a second of a worker's link inside its node; one alone in it needs none."""
        return math.inf if self.inside is None else self.inside / 8

    def latency_of(self, ranks: Collection[int]) -> float:
        """α between these workers."""
        if self.crosses(ranks) or self.inside_latency is None:
            return self.latency
        return self.inside_latency

    def all_reduce_seconds(
        self, size_bytes: float, ranks: Collection[int], sharing: int = 1
    ) -> float:
        """The function of this name, at the rate of ``collective_bytes_per_second``."""
        return all_reduce_seconds(size_bytes, len(ranks), *self._ring(ranks, sharing))

    def broadcast_seconds(
        self, size_bytes: float, ranks: Collection[int], sharing: int = 1
    ) -> float:
        """The function of this name, at the rate of ``collective_bytes_per_second``."""
        return broadcast_seconds(size_bytes, len(ranks), *self._all_at_once(ranks, sharing))

    def reduce_seconds(self, size_bytes: float, ranks: Collection[int], sharing: int = 1) -> float:
        """The function of this name, at the rate of ``collective_bytes_per_second``."""
        return reduce_seconds(size_bytes, len(ranks), *self._all_at_once(ranks, sharing))

    def all_gather_seconds(
        self, size_bytes: float, ranks: Collection[int], sharing: int = 1
    ) -> float:
        """The function of this name, at the rate; ``size_bytes`` comes from each worker."""
        return all_gather_seconds(size_bytes, len(ranks), *self._ring(ranks, sharing))

    def all_to_all_seconds(
        self, size_bytes: float, ranks: Collection[int], sharing: int = 1
    ) -> float:
        """The function of this name, at the rate; ``size_bytes`` are sent by each worker."""
        return all_to_all_seconds(size_bytes, len(ranks), *self._all_at_once(ranks, sharing))

    def _ring(self, ranks: Collection[int], sharing: int) -> tuple[float, float]:
        """B and α, where a node has one flow each way, whatever number of workers it has."""
        rate = self.collective_bytes_per_second(ranks, sharing=sharing)
        return rate, self.latency_of(ranks)

    def _all_at_once(self, ranks: Collection[int], sharing: int) -> tuple[float, float]:
        """B and α, where each worker of a node has a flow that leaves it."""
        flows = max(Counter(map(self.node, ranks)).values(), default=1)
        rate = self.collective_bytes_per_second(ranks, flows=flows, sharing=sharing)
        return rate, self.latency_of(ranks)

    def to_dict(self) -> dict[str, object]:
        """The arguments as plain JSON values: bits a second, seconds, ranks as text."""
        return {
            "bandwidth": self.bandwidth,
            "latency": self.latency,
            "upload": self.upload,
            "per_worker": {str(rank): value for rank, value in self.per_worker.items()},
            "switch": self.switch,
            **({} if self.inside is None else self._nodes()),
            **({"changes": {str(s): x for s, x in self.changes.items()}} if self.changes else {}),
        }

    def _nodes(self) -> dict[str, object]:
        return {
            "workers_per_node": self.workers_per_node,
            "inside": self.inside,
            "inside_latency": self.inside_latency,
        }

    def __repr__(self) -> str:
        parts = [repr(show_bandwidth(self.bandwidth)), f"latency={show_seconds(self.latency)!r}"]
        if self.upload is not None:
            parts.append(f"upload={show_bandwidth(self.upload)!r}")
        if self.per_worker:
            links = {rank: show_bandwidth(value) for rank, value in self.per_worker.items()}
            parts.append(f"per_worker={links}")
        if self.switch is not None:
            parts.append(f"switch={show_bandwidth(self.switch)!r}")
        if self.inside is not None and self.inside_latency is not None:
            parts.append(f"workers_per_node={self.workers_per_node}")
            parts.append(f"inside={show_bandwidth(self.inside)!r}")
            parts.append(f"inside_latency={show_seconds(self.inside_latency)!r}")
        if self.changes:
            told = {show_seconds(seconds): factor for seconds, factor in self.changes.items()}
            parts.append(f"changes={told}")
        return f"Network({', '.join(parts)})"


def _inside(
    workers: int, bandwidth: str | float | None, latency: str | float | None
) -> tuple[float, float] | None:
    """Bandwidth and latency inside a node of so many workers; None: there is one."""
    if workers == 1:
        for name, given in (("inside", bandwidth), ("inside_latency", latency)):
            if given is not None:
                raise ValueError(f"{name} needs nodes of several workers: give workers_per_node")
        return None
    return (
        to_bandwidth(USUAL_INSIDE if bandwidth is None else bandwidth),
        to_seconds(USUAL_INSIDE_LATENCY if latency is None else latency, allow_zero=True),
    )
