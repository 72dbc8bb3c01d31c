"""Formulas for the duration and the traffic of messages and collectives.

Symbols: size in bytes (M), bandwidth in bytes per second (B), latency in seconds (α), number of
workers (N). A message takes α + M/B (Hockney, "The communication challenge for MPP", Parallel
Computing 20(3), 1994). Adding tensors is assumed to take no time.
"""

import math

from offbeat.arguments import require_integer

NODE_BANDWIDTH, NODE_LATENCY = "100Gbit/s", "10us"
"""Default bandwidth and latency of the network between the processes of one node (machine)."""

FORWARD_SHARE = 1 / 3
"""Share of forward in the compute time of forward and backward, if backward takes twice as long."""


def message_seconds(size_bytes: float, bytes_per_second: float, latency_seconds: float) -> float:
    """Return the duration of one message from one worker to another: α + M/B.

    Source: Hockney 1994.
    """
    _require_cost(size_bytes, bytes_per_second, latency_seconds)
    return latency_seconds + size_bytes / bytes_per_second


def all_reduce_seconds(
    size_bytes: float, workers: int, bytes_per_second: float, latency_seconds: float
) -> float:
    """Return the duration of a ring all-reduce: 2(N−1)·(α + M/(N·B)).

    The ring does N−1 steps of reduce-scatter and N−1 steps of all-gather. In each step every worker
    sends one N-th of the tensor. With many workers the bandwidth term approaches 2M/B, and the
    latency term 2(N−1)·α grows linearly.

    Source: Patarasuk & Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
    workstations", JPDC 69(2), 2009.
    """
    _require_cost(size_bytes, bytes_per_second, latency_seconds, workers)
    chunk_bytes = size_bytes / workers
    return 2 * (workers - 1) * (latency_seconds + chunk_bytes / bytes_per_second)


def broadcast_seconds(
    size_bytes: float, workers: int, bytes_per_second: float, latency_seconds: float
) -> float:
    """Return the duration of a broadcast along a binomial tree: ⌈log₂ N⌉·(α + M/B).

    In each step every worker that has the tensor sends it to one worker that lacks it, if any. So
    the number of workers that have the tensor doubles in each step, except possibly in the last.

    Source: Thakur, Rabenseifner & Gropp, "Optimization of collective communication operations in
    MPICH", IJHPCA 19(1), 2005.
    """
    _require_cost(size_bytes, bytes_per_second, latency_seconds, workers)
    return _tree_rounds(workers) * (latency_seconds + size_bytes / bytes_per_second)


def reduce_seconds(
    size_bytes: float, workers: int, bytes_per_second: float, latency_seconds: float
) -> float:
    """Return the duration of a reduction to one worker along a binomial tree: ⌈log₂ N⌉·(α + M/B).

    Source: Thakur, Rabenseifner & Gropp 2005.
    """
    return broadcast_seconds(size_bytes, workers, bytes_per_second, latency_seconds)


def all_gather_seconds(
    size_bytes: float, workers: int, bytes_per_second: float, latency_seconds: float
) -> float:
    """Return the duration of a ring all-gather of M bytes from *each* worker: (N−1)·(α + M/B).

    In the first step every worker sends its own tensor to the next worker in the ring. In each
    later step it forwards the tensor that it received in the step before.

    Source: Thakur, Rabenseifner & Gropp 2005 (there with n = N·M bytes in total).
    """
    _require_cost(size_bytes, bytes_per_second, latency_seconds, workers)
    return (workers - 1) * (latency_seconds + size_bytes / bytes_per_second)


def all_to_all_seconds(
    size_bytes: float, workers: int, bytes_per_second: float, latency_seconds: float
) -> float:
    """Return the duration of an all-to-all of M bytes from each worker: (N−1)·(α + M/(N·B)).

    In step k = 1, …, N−1 every worker sends M/N bytes to the worker whose rank is larger by k
    (modulo N).

    Source: Thakur, Rabenseifner & Gropp 2005 (pairwise exchange).
    """
    _require_cost(size_bytes, bytes_per_second, latency_seconds, workers)
    return (workers - 1) * (latency_seconds + size_bytes / workers / bytes_per_second)


def all_reduce_bytes(size_bytes: float, workers: int) -> float:
    """Return the bytes that each worker sends in a ring all-reduce: 2(N−1)/N·M.

    Source: Patarasuk & Yuan 2009, who show that no all-reduce algorithm sends fewer.
    """
    _require_size(size_bytes, workers)
    return 2 * (workers - 1) / workers * size_bytes


def broadcast_bytes(size_bytes: float, workers: int) -> float:
    """Return the bytes that a worker sends in a broadcast, averaged over workers: (N−1)/N·M.

    N−1 workers receive M bytes once. In a binomial tree the root sends ⌈log₂ N⌉·M bytes, and the
    leaves send nothing.

    Source: Thakur, Rabenseifner & Gropp 2005.
    """
    _require_size(size_bytes, workers)
    return (workers - 1) / workers * size_bytes


def reduce_bytes(size_bytes: float, workers: int) -> float:
    """Return the bytes that a worker sends in a reduction, averaged over workers: (N−1)/N·M.

    N−1 workers send M bytes once. The root only receives.

    Source: Thakur, Rabenseifner & Gropp 2005.
    """
    return broadcast_bytes(size_bytes, workers)


def all_gather_bytes(size_bytes: float, workers: int) -> float:
    """Return the bytes that each worker sends in a ring all-gather of M bytes from each: (N−1)·M.

    Source: Thakur, Rabenseifner & Gropp 2005.
    """
    _require_size(size_bytes, workers)
    return (workers - 1) * size_bytes


def all_to_all_bytes(size_bytes: float, workers: int) -> float:
    """Return the bytes that each worker sends in an all-to-all of M bytes from each: (N−1)/N·M.

    Source: Thakur, Rabenseifner & Gropp 2005.
    """
    _require_size(size_bytes, workers)
    return (workers - 1) / workers * size_bytes


def _tree_rounds(workers: int) -> int:
    """Return ⌈log₂ N⌉, computed with integers."""
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
