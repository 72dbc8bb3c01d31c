"""The command ``run``: starts the workers of this machine, and may start their store.

The workers are processes of the standard library's ``multiprocessing``. On Linux, a *fork server*
imports torch and Offbeat once, and forks the workers. Elsewhere, or with ``fresh``, each worker is
a new interpreter. The launcher itself does not import torch.
"""

import asyncio
import contextlib
import ctypes
import importlib.util
import multiprocessing
import os
import signal
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from importlib.machinery import PathFinder
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from typing import NoReturn

from offbeat.elastic.address import WorkerCount
from offbeat.errors import OffbeatError
from offbeat.launcher.output import report
from offbeat.launcher.script import run_worker
from offbeat.launcher.store import await_store, listen, serve_in_process
from offbeat.launcher.supervisor import Supervisor
from offbeat.units import to_seconds

_PR_SET_CHILD_SUBREAPER = 36


def run(
    script: str,
    arguments: list[str] | None,
    *,
    workers: str,
    here: int | None,
    store: str | None,
    module: bool,
    fresh: bool,
    max_restarts: int,
    grace: str,
) -> NoReturn:
    """Run the workers of this machine until all have ended; see the command of this name.

    Without ``store`` this process starts one, which only this machine can reach. Exits with the
    code of ``Supervisor.run``.

    Raises:
        OffbeatError: The store does not answer or cannot be started, or the system is Windows.
        ValueError: Options conflict or have a wrong form, or there is no such module.
        FileNotFoundError: There is no such script.
    """
    here = _workers_here(workers, here, store)
    grace_seconds = to_seconds(grace, allow_zero=True)
    _require_program(script, module)
    if sys.platform == "win32":
        raise OffbeatError("offbeat run needs Linux or macOS")
    if store is not None:
        await_store(store)
    # Torch reads this variable when it is imported, which the fork server does.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, _cores() // here)))
    with contextlib.ExitStack() as stack:
        with _signals_held():
            context = _context(fresh)
        if isinstance(context, ForkServerContext):
            _await_server(context)  # a Ctrl-C ends this wait
        if store is None:
            # Workers of one machine need only loopback, and open no port to the network.
            loopback = "lo" if sys.platform == "linux" else "lo0"
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
            with _signals_held():
                store = stack.enter_context(_local_store(context))
        # Each worker has a default process group of its own, so that a script which calls
        # ``init_process_group()`` runs unchanged.
        variables = {
            **{"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": str(here)},
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"},
            **{"OFFBEAT_STORE": store, "OFFBEAT_WORKERS": workers},
        }
        argv = [script, *(arguments or ())]

        def start(own: Mapping[str, str], pipes: list[Connection]) -> BaseProcess:
            return start_process(context, run_worker, argv, module, {**variables, **own}, *pipes)

        report(f"{here} of {workers} workers here; the store is at {store}")
        raise SystemExit(asyncio.run(Supervisor(start, here, max_restarts, grace_seconds).run()))


def _workers_here(workers: str, here: int | None, store: str | None) -> int:
    """Return the number of workers on this machine. Raises ValueError if options conflict."""
    try:
        most = WorkerCount.parse(workers).most
    except ValueError as error:
        raise ValueError(f"--workers: {error}") from None
    if here is None:
        if store is not None:
            raise ValueError("--store needs --here, the number of workers on this machine")
        return most
    if here > most:
        raise ValueError(f"--here {here}: there are --workers {workers} in all")
    if here < most and store is None:
        raise ValueError(
            f"--here {here} of {most}: the other machines need a store. Start offbeat store on one "
            "machine, and give all --store, as in --store 10.0.0.1:29500"
        )
    return here


def _require_program(script: str, module: bool) -> None:
    """Raise ValueError or FileNotFoundError unless the script or module exists."""
    if module:
        package = script.partition(".")[0]
        # The workers also search the current directory.
        if not (PathFinder.find_spec(package, [os.getcwd()]) or importlib.util.find_spec(package)):
            raise ValueError(f"there is no module {package}, here or among the installed packages")
    elif not os.path.exists(script):
        raise FileNotFoundError(f"there is no script {script}")
    elif os.path.isdir(script):
        raise ValueError(f"{script} is a directory; name a script, or a module with -m")


def start_process(
    context: ForkServerContext | SpawnContext, target: Callable[..., object], *arguments: object
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


def _await_server(context: ForkServerContext) -> None:
    """Wait until the fork server has imported torch, so that it has forked a first process."""
    try:
        start_process(context, int).join()
    except EOFError:
        raise OffbeatError("the process that starts the workers has ended") from None


@contextlib.contextmanager
def _local_store(context: ForkServerContext | SpawnContext) -> Iterator[str]:
    """Run a store for this machine in a child process, and yield its address."""
    with listen("127.0.0.1", 0) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        process = start_process(context, serve_in_process, listener)
    try:
        yield address
    finally:
        process.kill()


def _cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
