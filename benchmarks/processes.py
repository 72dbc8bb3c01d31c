"""Worker processes of benchmarks: gloo over loopback or shaped links, one thread each."""

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness import ROOT
from offbeat.units import to_bandwidth
from offbeat_lab.launch.cluster import Cluster


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
        function: Function at the top level of a module; returns JSON values.
        workers: Number of processes.
        bandwidth: Bandwidth to shape the links to (needs root on Linux); None for loopback.
        seconds: Time limit.
        arguments: JSON values.

    Raises:
        RuntimeError: A worker failed.
    """
    module = importlib.import_module(function.__module__)
    name = function.__module__ if module.__spec__ is None else module.__spec__.name
    with contextlib.ExitStack() as stack:
        cluster = bandwidth and stack.enter_context(Cluster(workers, to_bandwidth(bandwidth)))
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="offbeat-bench-"))
        processes: list[subprocess.Popen[bytes]] = []
        stack.callback(_end, processes)
        for rank in range(workers):
            job = [name, function.__name__, json.dumps(arguments), folder, str(rank), str(workers)]
            argv, interface = [sys.executable, "-m", "benchmarks.processes", *job], "lo"
            if cluster:
                argv, interface = cluster.command(rank, argv), cluster.interface
            environment = {
                **os.environ,
                "GLOO_SOCKET_IFNAME": interface,
                "OMP_NUM_THREADS": "1",
                # Measure this source tree even if another one is installed.
                "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
            }
            processes.append(subprocess.Popen(argv, env=environment, start_new_session=True))
        codes = [process.wait(timeout=seconds) for process in processes]
        if any(codes):
            raise RuntimeError(f"workers of {name} ended with {codes}")
        return [json.loads(Path(folder, f"result{r}").read_text()) for r in range(workers)]


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _main(module: str, function: str, arguments: str, folder: str, rank: str, size: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=int(rank),
        world_size=int(size),
        timeout=timedelta(seconds=60),
    )
    result = getattr(importlib.import_module(module), function)(**json.loads(arguments))
    Path(folder, f"result{rank}").write_text(json.dumps(result))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # skips the shutdown of gloo's threads


if __name__ == "__main__":
    _main(*sys.argv[1:])
