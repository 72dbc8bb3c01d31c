"""Chooses the worker processes of a run: new ones, or those of torchrun.

A *job* is the settings of one run. A *runner* runs jobs on worker processes. *Under a launcher*
means that a launcher has started this process as one of the workers.
"""

import contextlib
import os
import shlex
import sys
from dataclasses import replace

from offbeat.extend import to_bandwidth
from offbeat_lab.job import Job
from offbeat_lab.launch.runners import ExternalLauncher, Loopback, Runner, ShapedLinks
from offbeat_lab.scenario import Scenario


def is_launched() -> bool:
    """Return True if a launcher has started this process as a worker.

    Raises:
        ValueError: only a part of the launcher's variables is set.
    """
    for name, other in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if name in os.environ and other not in os.environ:
            raise ValueError(f"{name} is set and {other} is not: set both, as torchrun, or neither")
    return "RANK" in os.environ


def require_single_process(what: str) -> None:
    """Raise ValueError under a launcher. ``what`` names the command or option in the message."""
    if is_launched():
        raise ValueError(f"{what} simulates all workers in one process: start it once, by itself")


def with_launched_workers(job: Job) -> Job:
    """Return ``job``. Under a launcher, replace its number of workers by the launcher's.

    Raises:
        ValueError: ``job.workers`` is neither the launcher's number nor the default.
    """
    if not is_launched():
        return job
    started = int(os.environ["WORLD_SIZE"])
    if job.workers not in (started, Job.workers):
        raise ValueError(
            f"--workers {job.workers}: the launcher has started {started}, leave the option out"
        )
    return replace(job, workers=started)


def command_line() -> str:
    """Return a command line that repeats this run, with ``torchrun`` under a launcher."""
    program = ["offbeat"]
    if is_launched():
        local = os.environ.get("LOCAL_WORLD_SIZE", "1")
        program = ["torchrun", "--nproc-per-node", local, "-m", "offbeat.cli"]
    return shlex.join([*program, *sys.argv[1:]])


def real_workers(job: Job, bandwidth: str | None) -> contextlib.AbstractContextManager[Runner]:
    """Return a context manager that provides a runner of jobs on real processes.

    Args:
        job: Job with the number of workers, the scenario and the time-out.
        bandwidth: Limit on the bandwidth of each worker's link. None: no limit.

    Raises:
        ValueError: ``bandwidth`` is given under a launcher.
    """
    # This variable is for scripts: the workers of this command would gather at that store.
    os.environ.pop("OFFBEAT_STORE", None)
    if is_launched():
        if bandwidth is not None:
            raise ValueError("--bandwidth shapes the links of processes that offbeat starts itself")
        return ExternalLauncher(job.timeout_seconds)
    if bandwidth is None:
        return contextlib.nullcontext(Loopback())
    scenario = Scenario.from_json(job.scenario)
    changes = scenario.changes("bandwidth", job.workers)
    nodes = len({process.worker for process in scenario.processes(job.workers)})
    return ShapedLinks(nodes, to_bandwidth(bandwidth), changes=changes)
