"""Formulas for the duration and the traffic of messages and collectives.

Symbols: size in bytes (M), bandwidth in bytes per second (B), latency in seconds (α), number of
workers (N). Adding tensors is assumed to take no time.

Sources:

* Messages, α + M/B each: Hockney, "The communication challenge for MPP", Parallel Computing
  20(3), 1994.
* All-reduce: Patarasuk & Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
  workstations", JPDC 69(2), 2009. They show that no all-reduce sends fewer bytes than the ring.
* All-gather and all-to-all: all messages are sent at the same time, as in gloo's all-to-all and in
  grouped messages of NCCL.
* All others: Thakur, Rabenseifner & Gropp, "Optimization of collective communication operations in
  MPICH", IJHPCA 19(1), 2005.
"""

NODE_BANDWIDTH, NODE_LATENCY = "100Gbit/s", "10us"
"""Default bandwidth and latency of the network between the processes of one node (machine)."""

FORWARD_SHARE = 1 / 3
"""Share of the forward pass in a step's computation. The backward pass takes twice as long."""


def all_reduce_seconds(
    size_bytes: float, workers: int, bytes_per_second: float, latency_seconds: float
) -> float:
    """Return the duration of a ring all-reduce: 2(N−1)·(α + M/(N·B)).

    The ring does N−1 steps of reduce-scatter and N−1 steps of all-gather. In each step every worker
    sends one N-th of the tensor.
    """
    chunk_bytes = size_bytes / workers
    return 2 * (workers - 1) * (latency_seconds + chunk_bytes / bytes_per_second)


def broadcast_seconds(
    size_bytes: float, workers: int, bytes_per_second: float, latency_seconds: float
) -> float:
    """Return the duration of a broadcast along a binomial tree: ⌈log₂ N⌉·(α + M/B).

    In each step every worker that has the tensor sends it to one that lacks it, until all have it.
    """
    return _tree_rounds(workers) * (latency_seconds + size_bytes / bytes_per_second)


def all_gather_seconds(
    size_bytes: float, workers: int, bytes_per_second: float, latency_seconds: float
) -> float:
    """Return the duration of an all-gather of M bytes from *each* worker: α + (N−1)·M/B.

    Every worker sends its tensor to all others at the same time. With one worker the duration is 0.
    """
    if workers == 1:
        return 0.0
    return latency_seconds + (workers - 1) * size_bytes / bytes_per_second


def all_to_all_seconds(
    size_bytes: float, workers: int, bytes_per_second: float, latency_seconds: float
) -> float:
    """Return the duration of an all-to-all of M bytes from each worker: α + (N−1)/N·M/B.

    Every worker sends M/N bytes to each of the others at the same time. With one worker the
    duration is 0.
    """
    return all_gather_seconds(size_bytes / workers, workers, bytes_per_second, latency_seconds)


def all_reduce_bytes(size_bytes: float, workers: int) -> float:
    """Return the bytes that each worker sends in a ring all-reduce: 2(N−1)/N·M."""
    return 2 * (workers - 1) / workers * size_bytes


def broadcast_bytes(size_bytes: float, workers: int) -> float:
    """Return the bytes that a worker sends in a broadcast, averaged over workers: (N−1)/N·M.

    Each of N−1 workers receives M bytes once.
    """
    return (workers - 1) / workers * size_bytes


def all_gather_bytes(size_bytes: float, workers: int) -> float:
    """Return the bytes that each worker sends in an all-gather of M bytes from each: (N−1)·M."""
    return (workers - 1) * size_bytes


def all_to_all_bytes(size_bytes: float, workers: int) -> float:
    """Return the bytes that each worker sends in an all-to-all of M bytes from each: (N−1)/N·M."""
    return (workers - 1) / workers * size_bytes


def _tree_rounds(workers: int) -> int:
    """Return ⌈log₂ N⌉."""
    return (workers - 1).bit_length()
