"""What communication costs: pure formulas, and the network whose links they are applied to.

The functions take plain numbers: sizes in bytes (M), a bandwidth in bytes a second (B), a latency
in seconds (α), a number of workers (N). They follow the α–β model (Hockney, "The communication
challenge for MPP", Parallel Computing 20(3), 1994): a message costs α + M/B. The arithmetic of a
reduction costs nothing.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from offbeat.strategies.base import require_integer
from offbeat.units import show_bandwidth, show_seconds, to_bandwidth, to_seconds


def message_seconds(size_bytes: float, bytes_per_second: float, latency_seconds: float) -> float:
    """One message from one worker to another: α + M/B.

    Source: Hockney 1994.
    """
    _require_cost(size_bytes, bytes_per_second, latency_seconds)
    return latency_seconds + size_bytes / bytes_per_second


def all_reduce_seconds(
    size_bytes: float, workers: int, bytes_per_second: float, latency_seconds: float
) -> float:
    """A ring all-reduce: 2(N−1)·(α + M/(N·B)), so 0 for one worker and 2M/B for many.

    N−1 rounds of reduce-scatter and N−1 of all-gather, in each of which every worker sends one
    N-th of the tensor.

    Source: Patarasuk & Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
    workstations", JPDC 69(2), 2009.
    """
    _require_cost(size_bytes, bytes_per_second, latency_seconds, workers)
    chunk_bytes = size_bytes / workers
    return 2 * (workers - 1) * (latency_seconds + chunk_bytes / bytes_per_second)


def broadcast_seconds(
    size_bytes: float, workers: int, bytes_per_second: float, latency_seconds: float
) -> float:
    """A broadcast down a binomial tree: ⌈log₂ N⌉·(α + M/B), 0 for one worker.

    In each round everyone who has the tensor sends all of it to one who has not.

    Source: Thakur, Rabenseifner & Gropp, "Optimization of collective communication operations in
    MPICH", IJHPCA 19(1), 2005.
    """
    _require_cost(size_bytes, bytes_per_second, latency_seconds, workers)
    return _tree_rounds(workers) * (latency_seconds + size_bytes / bytes_per_second)


def reduce_seconds(
    size_bytes: float, workers: int, bytes_per_second: float, latency_seconds: float
) -> float:
    """A reduction to one worker up a binomial tree: ⌈log₂ N⌉·(α + M/B), 0 for one worker.

    Source: Thakur, Rabenseifner & Gropp 2005.
    """
    return broadcast_seconds(size_bytes, workers, bytes_per_second, latency_seconds)


def all_gather_seconds(
    size_bytes: float, workers: int, bytes_per_second: float, latency_seconds: float
) -> float:
    """A ring all-gather of M bytes from *each* worker: (N−1)·(α + M/B), 0 for one worker.

    In each round every worker passes on the tensor that it received last.

    Source: Thakur, Rabenseifner & Gropp 2005 (there with n = N·M bytes in total).
    """
    _require_cost(size_bytes, bytes_per_second, latency_seconds, workers)
    return (workers - 1) * (latency_seconds + size_bytes / bytes_per_second)


def all_to_all_seconds(
    size_bytes: float, workers: int, bytes_per_second: float, latency_seconds: float
) -> float:
    """An all-to-all of M bytes from each worker, M/N to each: (N−1)·(α + M/(N·B)).

    In round k every worker sends to the k-th after it and receives from the k-th before it.

    Source: Thakur, Rabenseifner & Gropp 2005 (pairwise exchange).
    """
    _require_cost(size_bytes, bytes_per_second, latency_seconds, workers)
    return (workers - 1) * (latency_seconds + size_bytes / workers / bytes_per_second)


def all_reduce_bytes(size_bytes: float, workers: int) -> float:
    """Bytes that each worker sends in a ring all-reduce: 2(N−1)/N·M.

    Source: Patarasuk & Yuan 2009; no algorithm sends fewer.
    """
    _require_size(size_bytes, workers)
    return 2 * (workers - 1) / workers * size_bytes


def broadcast_bytes(size_bytes: float, workers: int) -> float:
    """Bytes that a worker sends in a broadcast, the mean over workers: (N−1)/N·M.

    All but the root receive M once. The root, which sends most, sends ⌈log₂ N⌉·M; leaves send
    nothing.

    Source: Thakur, Rabenseifner & Gropp 2005.
    """
    _require_size(size_bytes, workers)
    return (workers - 1) / workers * size_bytes


def reduce_bytes(size_bytes: float, workers: int) -> float:
    """Bytes that a worker sends in a reduction, the mean over workers: (N−1)/N·M.

    All but the root send M once.

    Source: Thakur, Rabenseifner & Gropp 2005.
    """
    return broadcast_bytes(size_bytes, workers)


def all_gather_bytes(size_bytes: float, workers: int) -> float:
    """Bytes that each worker sends in a ring all-gather of M bytes from each: (N−1)·M.

    Source: Thakur, Rabenseifner & Gropp 2005.
    """
    _require_size(size_bytes, workers)
    return (workers - 1) * size_bytes


def all_to_all_bytes(size_bytes: float, workers: int) -> float:
    """Bytes that each worker sends in an all-to-all of M bytes from each: (N−1)/N·M.

    Source: Thakur, Rabenseifner & Gropp 2005.
    """
    _require_size(size_bytes, workers)
    return (workers - 1) / workers * size_bytes


def _tree_rounds(workers: int) -> int:
    """⌈log₂ N⌉, exactly."""
    return (workers - 1).bit_length()


def _require_size(size_bytes: float, workers: int) -> None:
    require_integer("workers", workers, least=1)
    if not 0 <= size_bytes < math.inf:
        raise ValueError(f"size_bytes must be finite and at least 0, got {size_bytes}")


def _require_cost(
    size_bytes: float, bytes_per_second: float, latency_seconds: float, workers: int = 1
) -> None:
    _require_size(size_bytes, workers)
    if not 0 < bytes_per_second < math.inf:
        raise ValueError(f"bytes_per_second must be finite and positive, got {bytes_per_second}")
    if not 0 <= latency_seconds < math.inf:
        raise ValueError(f"latency_seconds must be finite and at least 0, got {latency_seconds}")


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
