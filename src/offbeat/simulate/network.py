"""The network of a simulated cluster: the links to which the formulas of ``costs`` are applied."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from offbeat.arguments import require_integer, require_mapping
from offbeat.costs import (
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

    Args:
        bandwidth: Of every link in each direction; with ``upload``, towards the worker.
        latency: α, from the start of a message to its first byte (≥ 0).
        upload: From the worker towards the switch, where it differs from ``bandwidth``.
        per_worker: Rank → bandwidth in both directions of that worker's link, instead of
            ``bandwidth`` and ``upload``.
        switch: What the switch carries in total, shared by all flows at once; None: no limit.

    Raises:
        TypeError: an argument that is neither text nor a number, or a rank that is no int.
        ValueError: a wrong unit, a number that is not positive and finite, a negative rank.
    """

    bandwidth: float
    latency: float
    upload: float | None
    per_worker: dict[int, float] = field(hash=False)
    switch: float | None

    def __init__(
        self,
        bandwidth: str | float,
        latency: str | float = "100us",
        *,
        upload: str | float | None = None,
        per_worker: Mapping[int, str | float] = {},
        switch: str | float | None = None,
    ) -> None:
        require_mapping("per_worker", per_worker)
        for rank in per_worker:
            require_integer("a rank in per_worker", rank, least=0)
        values = {
            "bandwidth": to_bandwidth(bandwidth),
            "latency": to_seconds(latency, allow_zero=True),
            "upload": None if upload is None else to_bandwidth(upload),
            "per_worker": {rank: to_bandwidth(per_worker[rank]) for rank in sorted(per_worker)},
            "switch": None if switch is None else to_bandwidth(switch),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def up(self, rank: int) -> float:
        """Bytes a second from worker ``rank`` to the switch."""
        everyone = self.bandwidth if self.upload is None else self.upload
        return self.per_worker.get(rank, everyone) / 8

    def down(self, rank: int) -> float:
        """Bytes a second from the switch to worker ``rank``."""
        return self.per_worker.get(rank, self.bandwidth) / 8

    def collective_bytes_per_second(self, ranks: Collection[int]) -> float:
        """B of a collective of ``ranks``: the least of their up and down, and of switch/N.

        Raises:
            ValueError: no rank, or one of them twice.
        """
        if not ranks or len(set(ranks)) != len(ranks):
            raise ValueError(f"a collective needs distinct ranks, got {list(ranks)}")
        slowest = min(min(self.up(rank), self.down(rank)) for rank in ranks)
        if self.switch is None:
            return slowest
        return min(slowest, self.switch / 8 / len(ranks))

    def message_seconds(self, size_bytes: float, source: int, destination: int) -> float:
        """α + M/min(up(source), down(destination), switch); 0 from a worker to itself."""
        rate = min(self.up(source), self.down(destination))
        if self.switch is not None:
            rate = min(rate, self.switch / 8)
        seconds = message_seconds(size_bytes, rate, self.latency)
        return 0.0 if source == destination else seconds

    def link_seconds(self, size_bytes: float, source: int, destination: int) -> tuple[float, float]:
        """How long a message keeps the sender's and the receiver's link busy.

        M/min(up(source), switch) and M/min(down(destination), switch), without the latency; 0 from
        a worker to itself.
        """
        if source == destination:
            return 0.0, 0.0
        switch = math.inf if self.switch is None else self.switch / 8
        up, down = min(self.up(source), switch), min(self.down(destination), switch)
        return size_bytes / up, size_bytes / down

    def all_reduce_seconds(self, size_bytes: float, ranks: Collection[int]) -> float:
        """The function of this name, at the rate of ``collective_bytes_per_second``."""
        rate = self.collective_bytes_per_second(ranks)
        return all_reduce_seconds(size_bytes, len(ranks), rate, self.latency)

    def broadcast_seconds(self, size_bytes: float, ranks: Collection[int]) -> float:
        """The function of this name, at the rate of ``collective_bytes_per_second``."""
        rate = self.collective_bytes_per_second(ranks)
        return broadcast_seconds(size_bytes, len(ranks), rate, self.latency)

    def reduce_seconds(self, size_bytes: float, ranks: Collection[int]) -> float:
        """The function of this name, at the rate of ``collective_bytes_per_second``."""
        rate = self.collective_bytes_per_second(ranks)
        return reduce_seconds(size_bytes, len(ranks), rate, self.latency)

    def all_gather_seconds(self, size_bytes: float, ranks: Collection[int]) -> float:
        """The function of this name, at the rate; ``size_bytes`` comes from each worker."""
        rate = self.collective_bytes_per_second(ranks)
        return all_gather_seconds(size_bytes, len(ranks), rate, self.latency)

    def all_to_all_seconds(self, size_bytes: float, ranks: Collection[int]) -> float:
        """The function of this name, at the rate; ``size_bytes`` are sent by each worker."""
        rate = self.collective_bytes_per_second(ranks)
        return all_to_all_seconds(size_bytes, len(ranks), rate, self.latency)

    def to_dict(self) -> dict[str, object]:
        """The arguments as plain JSON values: bits a second, seconds, ranks as text."""
        return {
            "bandwidth": self.bandwidth,
            "latency": self.latency,
            "upload": self.upload,
            "per_worker": {str(rank): value for rank, value in self.per_worker.items()},
            "switch": self.switch,
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
        return f"Network({', '.join(parts)})"
