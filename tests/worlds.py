"""Run a test function on simulated workers, or on real processes with ``--world gloo``.

The simulator computes the same values as real processes, bit for bit where the order of a sum does
not matter. tests/strategies/test_conformance.py and tests/transport/test_communicators.py verify
this; they always use real processes.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import workers
from offbeat import Compute, Network, Simulation, simulate

world = "simulated"  # set by conftest.py


def run(function: Callable[..., Any], *args: Any, workers: int, seconds: float = 60) -> list[Any]:
    """Run ``function(rank, size, *args)`` on ``workers`` workers; return results in rank order.

    Raises the exception of a worker that failed. A process reports its traceback as text.
    """
    if world == "gloo":
        return real(function, *args, workers=workers, seconds=seconds)
    return simulated(function, *args, workers=workers)


def simulated(
    function: Callable[..., Any], *args: Any, workers: int, workers_per_node: int = 1
) -> list[Any]:
    """Do the same on simulated workers, also with ``--world gloo``."""

    def worker() -> Any:
        return function(dist.get_rank(), dist.get_world_size(), *args)

    threads = torch.get_num_threads()
    # oneDNN with several threads in this process would make processes that are forked later hang.
    torch.set_num_threads(1)
    try:
        found = simulate(
            worker,
            workers=workers,
            network=Network("100Mbit/s", latency="100us", workers_per_node=workers_per_node),
            compute=Compute("5ms", jitter=0.3),
        )
    finally:
        torch.set_num_threads(threads)
    require_complete(found)
    return found.results


def require_complete(found: Simulation) -> None:
    """Assert that each worker computes or waits, without gaps, and that sent bytes are received."""
    clocks: dict[int, float] = {}
    for span in found.timeline:
        if span.kind != "transfer":
            clock = clocks.get(span.rank, span.start)
            assert abs(span.start - clock) <= 1e-9 * max(1.0, clock), (clock, span)
            assert span.end >= span.start, span
            clocks[span.rank] = span.end
    assert max(clocks.values(), default=0.0) == pytest.approx(found.seconds, rel=1e-9)
    sent, received = (
        sum(getattr(s, name) for s in found.timeline) for name in ("sent", "received")
    )
    assert sent == pytest.approx(received, rel=1e-6)


real = workers.run
