"""Chooses the worker processes of a run: new ones, or those of torchrun.

A *job* is the settings of one run. A *runner* runs jobs on worker processes. *Under a launcher*
means that a launcher has started this process as one of the workers.
"""

import contextlib
import importlib
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist

from offbeat import OffbeatError
from offbeat.extend import console, to_bandwidth
from offbeat_lab.job import Job
from offbeat_lab.launch.cores import share_cores
from offbeat_lab.launch.runners import ExternalLauncher, Loopback, Runner, ShapedLinks
from offbeat_lab.scenario import Scenario
from offbeat_lab.train import choose_backend


def is_launched() -> bool:
    """Return True if a launcher has started this process as a worker."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


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


@contextlib.contextmanager
def real_workers(
    job: Job, bandwidth: str | None, check: Callable[[], object]
) -> Iterator[Runner | None]:
    """Provide a runner of jobs on real processes, as a context manager.

    Under a launcher, rank 0 decides which jobs are run. Each other rank takes part in them while it
    enters its context. It blocks there until rank 0 has left its own context.

    Args:
        job: Job with the number of workers and the time-out.
        bandwidth: Limit on the bandwidth of each worker's link. None: no limit.
        check: Function that raises for mistakes. It is called before any process starts or
            connects, under a launcher on rank 0 only.

    Yields:
        The runner, or None under a launcher on ranks other than 0.

    Raises:
        ValueError: ``bandwidth`` is given under a launcher, or only a part of the launcher's
            variables is set.
    """
    for name, other in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if name in os.environ and other not in os.environ:
            raise ValueError(f"{name} is set and {other} is not: set both, as torchrun, or neither")
    # This variable is for scripts: the workers of this command would gather at that store.
    os.environ.pop("OFFBEAT_STORE", None)
    if is_launched():
        if bandwidth is not None:
            raise ValueError("--bandwidth shapes the links of processes that offbeat starts itself")
        with _launched(job, check) as runner:
            yield runner
        return
    check()
    if bandwidth is None:
        yield Loopback()
    else:
        scenario = Scenario.from_json(job.scenario)
        changes = scenario.by_worker(scenario.bandwidths(job.workers), job.workers)
        nodes = len({process.worker for process in scenario.processes(job.workers)})
        with ShapedLinks(nodes, to_bandwidth(bandwidth), changes=changes) as links:
            yield links


@contextlib.contextmanager
def _launched(job: Job, check: Callable[[], object]) -> Iterator[Runner | None]:
    if os.environ["RANK"] == "0":
        check()
    # Torch imports this module with the first optimizer. If the process group existed by then,
    # default arguments in the module would keep it, so destroy_process_group would not end gloo's
    # threads. One that frees a tensor while Python exits aborts the process.
    importlib.import_module("torch.distributed.nn")
    limit = job.timeout_seconds
    try:
        dist.init_process_group(choose_backend(), timeout=timedelta(seconds=limit))
    except dist.DistError as error:
        raise OffbeatError(
            f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} could not connect to the "
            f"others that the launcher has started, at {os.environ.get('MASTER_ADDR')}:"
            f"{os.environ.get('MASTER_PORT')} (MASTER_ADDR, MASTER_PORT) within --timeout "
            f"{limit:g} s: {str(error).strip().splitlines()[0]}"
        ) from None
    share_cores(int(os.environ.get("LOCAL_WORLD_SIZE", job.workers)))
    runner = ExternalLauncher()
    try:
        if dist.get_rank() > 0:
            runner.follow()
            yield None
        else:
            console.print(f"joined the {job.workers} processes that the launcher has started")
            yield runner
            runner.end()
    finally:
        dist.destroy_process_group()
