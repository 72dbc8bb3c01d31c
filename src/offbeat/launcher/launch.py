"""``launch``: starts and keeps the workers of this machine, and their store if it is the only one.

The workers are processes of the standard library's ``multiprocessing``. On Linux a *fork server*
has imported torch and Offbeat, and forks them. Elsewhere, or with ``fresh``, each is a new
interpreter.
"""

import ctypes
import multiprocessing
import os
import sys
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, SpawnContext

from offbeat.errors import OffbeatError
from offbeat.launcher.output import report
from offbeat.launcher.script import Program
from offbeat.launcher.signals import Interruption
from offbeat.launcher.supervisor import Supervisor
from offbeat.launcher.worker import Worker, starter

_PR_SET_CHILD_SUBREAPER = 36


def launch(
    program: Program,
    *,
    workers: str,
    here: int,
    store: str | None,
    max_restarts: int,
    fresh: bool,
    grace_seconds: float,
) -> int:
    """Run the workers of this machine to their end, and return the exit code.

    Args:
        program: What the workers run.
        workers: Number of workers of the training, as in ``OFFBEAT_WORKERS``.
        here: Number of workers on this machine.
        store: Address of the store, as in ``OFFBEAT_STORE``. None: this process keeps one, which
            only this machine can reach.
        max_restarts: Number of restarts of a worker. One that has lived for a minute has all again.
        fresh: True for a new interpreter for each worker.
        grace_seconds: Time that workers have to end after a signal.

    Raises:
        OffbeatError: The store does not answer; or this is Windows.
        ValueError: The store was begun with another number of workers.
    """
    if sys.platform == "win32":
        raise OffbeatError("offbeat run needs Linux or macOS")
    _open_standard_files()
    # Torch reads this variable when the fork server imports it.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, _cores() // here)))
    with Interruption() as interruption:
        context = _context(fresh)
        # Imported here: the fork server imports torch at the same time.
        from offbeat.launcher.store import open_store

        opened = open_store(store)
        if store is not None and not opened.agree_on_workers(workers, interruption.__bool__):
            return 128 + (interruption.signal or 0)
        if opened.training_has_ended():
            report(f"the training at {store} has ended; name another store for a new one")
            return 0
        report(f"{here} of {workers} workers here; the store is at {opened.address}")
        return Supervisor(
            [Worker(number, max_restarts) for number in range(here)],
            starter(context, program),
            {
                **_process_group(here),
                "OFFBEAT_STORE": opened.address,
                "OFFBEAT_WORKERS": workers,
            },
            opened,
            interruption,
            grace_seconds,
        ).run()


def _context(fresh: bool) -> ForkServerContext | SpawnContext:
    """Return the way in which processes are started, and start the fork server if there is one."""
    if fresh or sys.platform != "linux":  # other systems' libraries may not work after a fork
        return multiprocessing.get_context("spawn")
    with suppress(OSError, AttributeError):
        # Workers whose fork server has ended become children of this process.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["offbeat.launcher.preloaded"])
    forkserver.ensure_running()
    return context


def _open_standard_files() -> None:
    """Open those of the descriptors 0 to 2 that are closed. Another file would take the number."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest free number


def _cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _process_group(here: int) -> dict[str, str]:
    """Return the variables of the default process group of each of ``here`` workers.

    A worker is its only member, so that a script which calls ``init_process_group()`` runs
    unchanged.
    """
    return {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": str(here),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
