"""``launch``: starts the workers of this machine, restarts them, and may start their store.

The workers are processes of the standard library's ``multiprocessing``. On Linux, a *fork server*
imports torch and Offbeat once, and forks the workers. Elsewhere, or with ``fresh``, each worker is
a new interpreter. The launcher itself does not import torch.
"""

import asyncio
import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess

from offbeat.errors import OffbeatError
from offbeat.launcher.output import report
from offbeat.launcher.script import run_worker
from offbeat.launcher.store import await_store, listen, serve_in_process
from offbeat.launcher.supervisor import Supervisor

_PR_SET_CHILD_SUBREAPER = 36


def launch(
    argv: Sequence[str],
    *,
    is_module: bool,
    workers: str,
    here: int,
    store: str | None,
    max_restarts: int,
    fresh: bool,
    grace_seconds: float,
) -> int:
    """Run the workers of this machine until all have ended, and return the exit code.

    Args:
        argv: Path of the script, or name of the module, and the arguments.
        is_module: True if ``argv`` begins with the name of a module.
        workers: Number of workers of the training, as in ``OFFBEAT_WORKERS``.
        here: Number of workers on this machine.
        store: Address of the store, as in ``OFFBEAT_STORE``. None: this function starts a store in
            a child process. Only this machine can reach it.
        max_restarts: Number of restarts after which a worker is given up. Training for a minute
            resets the count.
        fresh: True if each worker is a new interpreter.
        grace_seconds: Time from a signal until workers that still run are killed.

    Raises:
        OffbeatError: The store does not answer or cannot be started, or the system is Windows.
    """
    if sys.platform == "win32":
        raise OffbeatError("offbeat run needs Linux or macOS")
    # Torch reads this variable when it is imported, which the fork server does.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, _cores() // here)))
    with contextlib.ExitStack() as stack:
        with _signals_held():
            context = _context(fresh)
            if store is None:
                # Workers of one machine need only loopback, and open no port to the network.
                loopback = "lo" if sys.platform == "linux" else "lo0"
                os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
                store = stack.enter_context(_local_store(context))
        await_store(store)
        # Each worker has a default process group of its own, so that a script which calls
        # ``init_process_group()`` runs unchanged.
        variables = {
            **{"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": str(here)},
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"},
            **{"OFFBEAT_STORE": store, "OFFBEAT_WORKERS": workers},
        }

        def start(own: Mapping[str, str], pipes: list[Connection]) -> BaseProcess:
            return start_process(context, run_worker, argv, is_module, {**variables, **own}, *pipes)

        report(f"{here} of {workers} workers here; the store is at {store}")
        return asyncio.run(Supervisor(start, here, max_restarts, grace_seconds).run())


def start_process(
    context: ForkServerContext | SpawnContext, target: Callable[..., None], *arguments: object
) -> BaseProcess:
    """Start a process that calls ``target``, without importing the main module of this process.

    Raises OSError, or EOFError if the fork server has ended.
    """
    # A script may check the process name, which is "MainProcess" if ``python`` runs the script.
    process = context.Process(target=target, args=arguments, name="MainProcess")
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        process.start()
    finally:
        sys.modules["__main__"] = main
    return process


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Block SIGINT and SIGTERM in the ``with`` block, also in the processes that it starts.

    Otherwise Ctrl-C could interrupt the imports of the fork server, or end this process before it
    has sent the arguments of a new process to it.
    """
    resource_tracker.ensure_running()  # first, because it unblocks the signals
    held = {signal.SIGINT, signal.SIGTERM} - signal.pthread_sigmask(signal.SIG_BLOCK, ())
    signal.pthread_sigmask(signal.SIG_BLOCK, held)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, held)


def _context(fresh: bool) -> ForkServerContext | SpawnContext:
    """Return the context that starts the processes, and start its fork server if it has one."""
    if fresh or sys.platform != "linux":  # other systems' libraries may not work after a fork
        return multiprocessing.get_context("spawn")
    with contextlib.suppress(OSError, AttributeError):
        # Workers whose fork server has ended become children of this process.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["offbeat.launcher.preloaded"])
    forkserver.ensure_running()
    return context


@contextlib.contextmanager
def _local_store(context: ForkServerContext | SpawnContext) -> Iterator[str]:
    """Run a store for this machine in a child process, and yield its address."""
    with listen("127.0.0.1", 0) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        try:
            process = start_process(context, serve_in_process, listener)
        except EOFError:
            raise OffbeatError("the process that starts the workers has ended") from None
    try:
        yield address
    finally:
        process.kill()


def _cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
