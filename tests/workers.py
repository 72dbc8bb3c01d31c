"""Real worker processes for tests: gloo over loopback, finite time-outs, ports that are free.

``run(function, workers=3)`` starts processes that each call ``function(rank, size)`` inside an
initialised process group and returns their results in rank order.
"""

import faulthandler
import os
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# torch asks for the name of every loopback connection, and a name server that is out of reach keeps
# it waiting for 5 s: nobody is asked.
os.environ["RES_OPTIONS"] = "attempts:0"
torch.optim.SGD([torch.zeros(1)], lr=0.1)  # imports, once, what optimizers need in every child


class WorkerFailedError(AssertionError):
    """A worker raised; the message holds its traceback."""


class StartError(Exception):
    """The workers were not connected: gloo's own start fails now and then on a busy machine."""


def _main(
    rank: int,
    size: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    folder: str,
    listener: socket.socket,
) -> None:
    faulthandler.enable()
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    connected = False
    try:
        # No file: it would be polled, which takes longer than most tests.
        store = dist.TCPStore(
            "127.0.0.1",
            listener.getsockname()[1],
            is_master=rank == 0,
            master_listen_fd=listener.fileno() if rank == 0 else None,
            wait_for_workers=False,
            timeout=timedelta(seconds=30),
        )
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=30)
        )
        connected = True
        result = (True, connected, function(rank, size, *args))
    except BaseException:
        result = (False, connected, traceback.format_exc())
    torch.save(result, f"{folder}/partial{rank}")
    os.rename(f"{folder}/partial{rank}", f"{folder}/result{rank}")
    os._exit(0)  # after a failure on purpose, gloo must not wait for the dead


def run(
    function: Callable[..., Any],
    *args: Any,
    workers: int,
    seconds: float = 60,
    may_die: tuple[int, ...] = (),
) -> list[Any]:
    """Run ``function(rank, size, *args)`` on ``workers`` processes; None for one that died.

    Raises:
        WorkerFailedError: a worker raised, or died without being in ``may_die``, or the time ran
            out.
    """
    try:
        return _run(function, *args, workers=workers, seconds=seconds, may_die=may_die)
    except StartError:
        return _run(function, *args, workers=workers, seconds=seconds, may_die=may_die)


def _run(
    function: Callable[..., Any],
    *args: Any,
    workers: int,
    seconds: float,
    may_die: tuple[int, ...],
) -> list[Any]:
    context = mp.get_context("fork")  # torch is imported once
    listener = socket.create_server(("127.0.0.1", 0))  # rank 0 serves the store behind it
    with tempfile.TemporaryDirectory() as folder, listener:
        processes = [
            context.Process(
                target=_main, args=(rank, workers, function, args, folder, listener), daemon=True
            )
            for rank in range(workers)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + seconds
        try:
            for process in processes:
                process.join(max(0.1, deadline - time.monotonic()))
            stuck = [rank for rank, process in enumerate(processes) if process.is_alive()]
            for rank in stuck:  # faulthandler shows where
                os.kill(processes[rank].pid or 0, signal.SIGABRT)
                processes[rank].join(5)
        finally:
            for process in processes:
                process.kill()
        results: list[Any] = []
        errors = [f"ranks {stuck} did not end within {seconds} s"] if stuck else []
        for rank in range(workers):
            path = Path(folder, f"result{rank}")
            if not path.exists():
                results.append(None)
                if rank not in may_die and rank not in stuck:
                    errors.append(f"rank {rank} died")
                continue
            ok, connected, value = torch.load(path, weights_only=False)
            if not connected:
                raise StartError(value)
            results.append(value)
            if not ok:
                errors.append(f"rank {rank} raised:\n{value}")
        if errors:
            raise WorkerFailedError("\n".join(errors))
        return results
