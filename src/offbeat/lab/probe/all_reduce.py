"""Latency and bandwidth of all-reduces among all workers."""

import statistics
import time

import torch
from torch import Tensor

from offbeat.lab.probe.pairwise import END, PING_SHARE, PINGS, repeat
from offbeat.lab.probe.result import AllReduce
from offbeat.transport.communicator import Communicator
from offbeat.units import show_bytes


def measure_all_reduce(
    communicator: Communicator, noise: Tensor, scratch: Tensor, seconds: float
) -> AllReduce | None:
    """Measure small and large all-reduces for about ``seconds``. A collective.

    After some small all-reduces, rank 0 broadcasts how many more of them follow. Before each large
    one it broadcasts the size, or the end. Each all-reduce sums a prefix of ``noise`` (float32)
    into ``scratch``, a buffer of the same size.

    Returns:
        The result on rank 0, None on the other ranks.
    """
    durations: list[float] = []
    decision = torch.zeros(1, dtype=torch.int64)

    def from_rank_0(number: int) -> int:
        decision.fill_(number)
        communicator.broadcast(decision, what="next measurement").wait()
        return int(decision.item())

    def reduce(count: int) -> float:
        scratch[:count].copy_(noise[:count])
        start = time.perf_counter()
        communicator.sum(scratch[:count], what=f"all-reduce of {show_bytes(4 * count)}").wait()
        durations.append(time.perf_counter() - start)
        return durations[-1]

    def slowest() -> list[float]:
        """Return the slowest worker's time of each all-reduce since the last call."""
        times = torch.tensor(durations, dtype=torch.float64)
        durations.clear()
        communicator.maximum(times, what="times of the all-reduces").wait()
        return times.tolist()

    least, most = PINGS
    once = statistics.median(reduce(1) for _ in range(least))
    for _ in range(from_rank_0(max(least, min(most, int(PING_SHARE * seconds / once))))):
        reduce(1)
    latency = statistics.median(slowest()[least:])
    if communicator.rank != 0:
        while (count := from_rank_0(0)) != END:
            reduce(count)
        slowest()
        return None
    budget = (1 - PING_SHARE) * seconds
    size, times = repeat(lambda size: reduce(from_rank_0(size // 4)), 4 * noise.numel(), budget)
    from_rank_0(END)
    median = statistics.median(slowest()[-len(times) :])
    return AllReduce(
        latency_seconds=latency,
        seconds=median,
        message_bytes=size,
        repetitions=len(times),
        algorithm_bytes_per_second=size / median,
        bus_bytes_per_second=2 * (communicator.size - 1) / communicator.size * size / median,
    )
