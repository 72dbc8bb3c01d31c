"""``launch``: starts and keeps the workers of this machine, and the store if it is the first."""

import os
import shlex
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from offbeat.errors import OffbeatError
from offbeat.launcher.output import report
from offbeat.launcher.signals import Interruption
from offbeat.launcher.supervisor import Supervisor
from offbeat.launcher.worker import Program, Starter, Worker

if TYPE_CHECKING:
    from offbeat.launcher.store import LaunchStore

_KEEP_SECONDS = 60.0  # longest time that the store is kept for launchers on other machines
_POLL_SECONDS = 0.1


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Settings of a launcher.

    Attributes:
        program: What the workers run.
        workers: Number of workers of the training, as in ``OFFBEAT_WORKERS``. None: the number in
            the store.
        here: Number of workers on this machine.
        store: Address of the store, as in ``OFFBEAT_STORE``.
        keeps_store: True to keep the store at this address in this process.
        max_restarts: Number of restarts of a worker. One that has lived for a minute has all again.
        fresh: True for a new interpreter for each worker instead of a fork of a warm server.
        grace_seconds: Time that workers have to end after a signal.
    """

    program: Program
    workers: str | None
    here: int
    store: str
    keeps_store: bool
    max_restarts: int
    fresh: bool
    grace_seconds: float


def launch(settings: Launch) -> int:
    """Run the workers of this machine to their end, and return the exit code.

    Raises:
        OffbeatError: The store cannot be kept or does not answer; or this is Windows.
        ValueError: The store was begun with another number of workers.
    """
    if sys.platform == "win32":
        raise OffbeatError("offbeat run needs Linux or macOS")
    with Interruption() as interruption:
        environment = _environment(settings.here)
        starter = Starter(settings.program, environment, fresh=settings.fresh)
        try:
            # Imported here: the server of ``starter`` imports torch at the same time.
            from offbeat.launcher.store import open_store

            store = open_store(settings.store, keep=settings.keeps_store)
            workers = store.agree_on_workers(settings.workers, interruption.__bool__)
            if workers is None:
                return 128 + (interruption.signal or 0)
            if store.training_has_ended():
                report(
                    f"the training at {store.address} has ended; name another store for a new one"
                )
                return 0
            _show(settings, workers, store.address)
            store.announce()
            supervisor = Supervisor(
                [Worker(number, settings.max_restarts) for number in range(settings.here)],
                starter,
                {"OFFBEAT_STORE": store.address, "OFFBEAT_WORKERS": workers},
                store,
                interruption,
                settings.grace_seconds,
            )
            try:
                return supervisor.run()
            finally:
                store.say_goodbye()
                _keep_for_others(store, interruption, settings.grace_seconds)
        finally:
            starter.close()


def _keep_for_others(
    store: "LaunchStore", interruption: Interruption, grace_seconds: float
) -> None:
    """Wait until no other launcher uses the store that this process keeps, for at most 60 s.

    After a signal the wait ends with the time that workers have to end.
    """
    ended_at, told = time.monotonic(), False
    while others := store.other_launchers():
        end = interruption.since + grace_seconds if interruption else ended_at + _KEEP_SECONDS
        left = end - time.monotonic()
        if left <= 0:
            report(f"the store ends; other launchers may still need it ({others})")
            return
        if not told:
            report(f"keeping the store for the other launchers ({others}), at most {left:.0f} s")
            told = True
        time.sleep(_POLL_SECONDS)


def _environment(here: int) -> dict[str, str]:
    """Return this process's environment with the variables that all ``here`` workers share.

    Each worker is the only member of the default process group, so that a script which calls
    ``init_process_group()`` runs unchanged. The workers divide the cores of this machine, unless
    ``OMP_NUM_THREADS`` is set.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "OMP_NUM_THREADS": str(max(1, (cores or 1) // here)),
        **os.environ,
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": str(here),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }


def _show(settings: Launch, workers: str, address: str) -> None:
    """Report the store and, if workers are missing, the command for the other machines."""
    report(f"{settings.here} of {workers} workers here; the store is at {address}")
    missing = int(workers.rpartition(":")[2]) - settings.here
    if missing > 0 and settings.keeps_store:
        program = settings.program
        line = ["offbeat", "run", "--join", address, "--here", str(missing)]
        line += ["-m"] * program.is_module + [program.target, *program.arguments]
        report(f"on another machine: {shlex.join(line)}")
