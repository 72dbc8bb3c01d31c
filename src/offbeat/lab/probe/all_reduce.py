"""Measure all-reduces among all workers."""

import statistics
import time

import torch
from torch import Tensor

from offbeat.lab.probe.link import END, PING_SHARE, PINGS, repeat
from offbeat.lab.probe.result import AllReduce
from offbeat.transport.communicator import Communicator
from offbeat.units import show_bytes


def measure_all_reduce(
    communicator: Communicator, noise: Tensor, scratch: Tensor, seconds: float
) -> AllReduce | None:
    """Measure all-reduces as rank 0 directs; the result is there only."""
    taken: list[float] = []
    order = torch.zeros(1, dtype=torch.int64)

    def direct(number: int) -> int:
        order.fill_(number)
        communicator.broadcast(order, what="next measurement").wait()
        return int(order.item())

    def reduce(count: int) -> float:
        scratch[:count].copy_(noise[:count])
        start = time.perf_counter()
        communicator.sum(scratch[:count], what=f"all-reduce of {show_bytes(4 * count)}").wait()
        taken.append(time.perf_counter() - start)
        return taken[-1]

    def slowest() -> list[float]:
        """Of each all-reduce since the last call, the time of the worker that had it last."""
        times = torch.tensor(taken, dtype=torch.float64)
        taken.clear()
        communicator.maximum(times, what="times of the all-reduces").wait()
        return [float(one) for one in times]

    least, most = PINGS
    once = statistics.median(reduce(1) for _ in range(least))
    for _ in range(direct(max(least, min(most, int(PING_SHARE * seconds / once))))):
        reduce(1)
    latency = statistics.median(slowest()[least:])
    if communicator.rank != 0:
        while (count := direct(0)) != END:
            reduce(count)
        slowest()
        return None
    budget = (1 - PING_SHARE) * seconds
    size, times = repeat(lambda size: reduce(direct(size // 4)), 4 * noise.numel(), budget)
    direct(END)
    median = statistics.median(slowest()[-len(times) :])
    return AllReduce(
        latency_seconds=latency,
        seconds=median,
        message_bytes=size,
        repetitions=len(times),
        algorithm_bytes_per_second=size / median,
        bus_bytes_per_second=2 * (communicator.size - 1) / communicator.size * size / median,
    )
