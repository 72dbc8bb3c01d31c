"""Real worker processes for tests: gloo over loopback, finite time-outs, free ports.

``run(function, workers=3)`` starts processes that each call ``function(rank, size)`` inside an
initialised process group, and returns their results in rank order. With ``newcomers=n`` there are n
further processes and no process group, and a process of its own serves the store, so that every
worker may be killed. ``MASTER_ADDR`` and ``MASTER_PORT`` hold the address of the store.
"""

import faulthandler
import functools
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

# torch looks up the host name of every loopback connection, and waits 5 s for a name server that is
# out of reach. This setting prevents the lookup.
os.environ["RES_OPTIONS"] = "attempts:0"
# Import and compile once in the parent what every child needs.
torch.optim.SGD([torch.zeros(1)], lr=0.1)  # imports more of torch when it is made
kernels()


class WorkerFailedError(AssertionError):
    """A worker raised; the message holds its traceback."""


class StartError(Exception):
    """The workers could not connect: gloo's start-up fails now and then on a busy machine."""


def _main(
    rank: int,
    size: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    folder: str,
    listener: socket.socket,
    own_store: bool,
    per_node: int | None,
) -> None:
    gc.freeze()  # the objects of the parent: collecting them would copy their memory to each child
    faulthandler.enable()
    torch.set_num_threads(1)
    host, port = listener.getsockname()
    os.environ.update(GLOO_SOCKET_IFNAME="lo", MASTER_ADDR=host, MASTER_PORT=str(port))
    if per_node is not None:
        os.environ.update(LOCAL_RANK=str(rank % per_node), LOCAL_WORLD_SIZE=str(per_node))
    connected = False
    try:
        if own_store or rank > 0:
            listener.close()
        if not own_store:
            # A file store would be polled, which takes longer than most tests.
            store = _store(port, None if rank > 0 else listener)
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


def _serve_store(listener: socket.socket) -> None:
    store = _store(listener.getsockname()[1], listener)
    store.set("store", str(os.getpid()))
    while True:
        signal.pause()


def _retried(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def retried(*args: Any, **options: Any) -> Any:
        for _ in range(4):
            try:
                return function(*args, **options)
            except StartError as error:
                failed = error
        raise failed

    return retried


@_retried
def run(
    function: Callable[..., Any],
    *args: Any,
    workers: int,
    seconds: float = 60,
    may_die: tuple[int, ...] = (),
    newcomers: int | None = None,
    start: str = "fork",
    workers_per_node: int | None = None,
) -> list[Any]:
    """Run ``function(rank, size, *args)`` on ``workers`` processes.

    Args:
        function: Called by every worker.
        args: Its further arguments.
        workers: Number of processes, in a process group unless there are ``newcomers``.
        seconds: Time limit. Workers that exceed it print their stacks and are killed.
        may_die: Ranks that may be killed; their result is None.
        newcomers: Number of further processes. With a number, also with 0, there is no process
            group, and the store has a process of its own.
        start: How processes start: "fork", which imports torch once, or "spawn", which CUDA needs.
        workers_per_node: Number of workers for which to set the environment of torchrun.

    Raises:
        WorkerFailedError: a worker raised, or died without being in ``may_die``, or the time ran
            out.
    """
    context = mp.get_context(start)
    own_store, ranks = newcomers is not None, range(workers + (newcomers or 0))
    listener = socket.create_server(("127.0.0.1", 0))  # rank 0 serves the store behind it
    with tempfile.TemporaryDirectory() as folder, listener:
        processes = [
            context.Process(
                target=_main,
                args=(rank, workers, function, args, folder, listener, own_store, workers_per_node),
                daemon=True,
            )
            for rank in ranks
        ]
        keeper = context.Process(target=_serve_store, args=(listener,), daemon=True)
        for process in [*processes, *([keeper] if own_store else [])]:
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
            for process in [*processes, *([keeper] if own_store else [])]:
                process.kill()
        results: list[Any] = []
        errors = [f"ranks {stuck} did not end within {seconds} s"] if stuck else []
        for rank in ranks:
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
