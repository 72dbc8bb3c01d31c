"""Real worker processes for tests: gloo over loopback, finite time-outs, ports that are free.

``run(function, workers=3)`` starts processes that each call ``function(rank, size)`` inside an
initialised process group and returns their results in rank order. With ``newcomers`` as many more
call it outside of one, and the store is kept by a process that nobody kills; its address is in
``MASTER_ADDR`` and ``MASTER_PORT``.
"""

import faulthandler
import gc
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

from offbeat import attach  # noqa: F401 - with all modules of the package
from offbeat.quantization.kernels import kernels

# torch asks for the name of every loopback connection, and a name server that is out of reach keeps
# it waiting for 5 s: nobody is asked.
os.environ["RES_OPTIONS"] = "attempts:0"
# What every child needs is imported and compiled once, here.
torch.optim.SGD([torch.zeros(1)], lr=0.1)  # imports more of torch when it is made
kernels()


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
    kept: bool,
) -> None:
    gc.freeze()  # the objects of the parent: collecting them would copy their memory to each child
    faulthandler.enable()
    torch.set_num_threads(1)
    host, port = listener.getsockname()
    os.environ.update(GLOO_SOCKET_IFNAME="lo", MASTER_ADDR=host, MASTER_PORT=str(port))
    connected = False
    try:
        if kept or rank > 0:
            listener.close()
        if rank < size:
            # No file: it would be polled, which takes longer than most tests.
            store = _store(port, None if kept or rank > 0 else listener)
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


def _store(port: int, listener: socket.socket | None = None) -> Any:
    return dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=listener is not None,
        master_listen_fd=None if listener is None else listener.fileno(),
        wait_for_workers=False,
        timeout=timedelta(seconds=30),
    )


def _keep(listener: socket.socket) -> None:
    kept = _store(listener.getsockname()[1], listener)
    while kept is not None:
        signal.pause()


def run(
    function: Callable[..., Any],
    *args: Any,
    workers: int,
    seconds: float = 60,
    may_die: tuple[int, ...] = (),
    newcomers: int | None = None,
) -> list[Any]:
    """Run ``function(rank, size, *args)`` on ``workers`` processes; None for one that died.

    ``newcomers`` come with the ranks after them; 0 has the store kept apart, too.

    Raises:
        WorkerFailedError: a worker raised, or died without being in ``may_die``, or the time ran
            out.
    """
    for _ in range(2):
        try:
            return _run(function, args, workers, seconds, may_die, newcomers)
        except StartError as error:
            failed = error
    raise failed


def _run(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    workers: int,
    seconds: float,
    may_die: tuple[int, ...],
    newcomers: int | None,
) -> list[Any]:
    context = mp.get_context("fork")  # torch is imported once
    kept, everyone = newcomers is not None, range(workers + (newcomers or 0))
    listener = socket.create_server(("127.0.0.1", 0))  # rank 0 serves the store behind it
    with tempfile.TemporaryDirectory() as folder, listener:
        processes = [
            context.Process(
                target=_main,
                args=(rank, workers, function, args, folder, listener, kept),
                daemon=True,
            )
            for rank in everyone
        ]
        keeper = context.Process(target=_keep, args=(listener,), daemon=True)
        for process in [*processes, *([keeper] if kept else [])]:
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
            for process in [*processes, *([keeper] if kept else [])]:
                process.kill()
        results: list[Any] = []
        errors = [f"ranks {stuck} did not end within {seconds} s"] if stuck else []
        for rank in everyone:
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
