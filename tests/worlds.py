"""Where tests of values run: on simulated workers, or on real processes with ``--world gloo``.

The simulator gives what processes give, bit for bit where the order of sums does not matter: that
is what tests/strategies/test_conformance.py and tests/transport/test_communicators.py verify, on
real processes always. It is their licence for this.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import workers
from offbeat import Compute, Network, simulate

world = "simulated"  # set by conftest.py


def run(function: Callable[..., Any], *args: Any, workers: int, seconds: float = 60) -> list[Any]:
    """Results of ``function(rank, size, *args)`` on so many workers, in rank order.

    A failure raises what the worker raised (or, from a process, its traceback as text).
    """
    if world == "gloo":
        return real(function, *args, workers=workers, seconds=seconds)
    return simulated(function, *args, workers=workers)


def simulated(
    function: Callable[..., Any], *args: Any, workers: int, workers_per_node: int = 1
) -> list[Any]:
    """The same on simulated workers, whatever the world."""

    def worker() -> Any:
        return function(dist.get_rank(), dist.get_world_size(), *args)

    threads = torch.get_num_threads()
    # What oneDNN has prepared here for several threads would hang in processes forked later.
    torch.set_num_threads(1)
    try:
        return simulate(
            worker,
            workers=workers,
            network=Network("100Mbit/s", latency="100us", workers_per_node=workers_per_node),
            compute=Compute("5ms", jitter=0.3),
        ).results
    finally:
        torch.set_num_threads(threads)


real = workers.run
