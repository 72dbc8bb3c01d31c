"""Worker processes of benchmarks: gloo over loopback or shaped links, one thread each."""

import contextlib
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from offbeat.units import to_bandwidth
from offbeat_lab.launch.cluster import Cluster, enter_namespace


def run(
    function: Callable[..., Any],
    *,
    workers: int,
    bandwidth: str | None = None,
    seconds: float = 180,
    **arguments: Any,
) -> list[Any]:
    """Call ``function(**arguments)`` on every worker; return the results in rank order.

    Each call runs in a process of its own, inside an initialized gloo group.

    Args:
        function: Function at the top level of a module.
        workers: Number of processes.
        bandwidth: Bandwidth to shape the links to (needs root on Linux); None for loopback.
        seconds: Time limit.
        arguments: Arguments of the function.

    Raises:
        multiprocessing.TimeoutError: The calls took longer than the limit.
    """
    with contextlib.ExitStack() as stack:
        cluster = bandwidth and stack.enter_context(Cluster(workers, to_bandwidth(bandwidth)))
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="offbeat-bench-"))
        calls = [
            (function, arguments, folder, rank, workers, cluster.node(rank) if cluster else None)
            for rank in range(workers)
        ]
        # No process gets two calls, because each call waits for the others.
        pool = stack.enter_context(multiprocessing.get_context("spawn").Pool(workers))
        return pool.starmap_async(_call, calls, chunksize=1).get(seconds)


def _call(
    function: Callable[..., Any],
    arguments: dict[str, Any],
    folder: str,
    rank: int,
    size: int,
    node: str | None,
) -> Any:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if node is None else Cluster.interface
    if node is not None:
        enter_namespace(node)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=60),
    )
    result = function(**arguments)
    dist.barrier()
    return result
