"""Tasks of ``srun`` as workers: what Slurm tells them, in the variables that torchrun sets.

A batch script has ``SLURM_NTASKS``, too, and runs once: what counts is the step, which ``srun``
begins.
"""

import os
import re
import socket
from collections.abc import Mapping

from offbeat.errors import OffbeatError

_FIRST_PORT, _PORTS = 15000, 15000  # below those that Linux gives to clients


def is_task(environment: Mapping[str, str]) -> bool:
    """Whether this process is one of several tasks of a step, and no other launcher's worker."""
    several = int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1
    return several and "TORCHELASTIC_RUN_ID" not in environment


def as_torchrun(environment: Mapping[str, str]) -> dict[str, str]:
    """What torchrun would have put into the environment of this task of ``srun``.

    Nothing where it is not one of several, or where ``RANK`` is set already. The workers meet at
    the first node of the step, where rank 0 is unless tasks are placed by hand, at a port between
    15000 and 29999 that follows from the numbers of job and step; ``MASTER_ADDR`` and
    ``MASTER_PORT`` say otherwise.

    Raises:
        OffbeatError: a variable is missing, or the node has no address; the message says what to
            set.
    """
    if "RANK" in environment or not is_task(environment):
        return {}
    try:
        rank, size = environment["SLURM_PROCID"], environment["SLURM_STEP_NUM_TASKS"]
        here = _expand(environment["SLURM_STEP_TASKS_PER_NODE"])[int(environment["SLURM_NODEID"])]
        found = {
            "RANK": rank,
            "WORLD_SIZE": size,
            "LOCAL_RANK": environment["SLURM_LOCALID"],
            "LOCAL_WORLD_SIZE": str(here),
        }
        if "MASTER_ADDR" not in environment:
            found["MASTER_ADDR"] = _address(environment["SLURM_STEP_NODELIST"], size)
        if "MASTER_PORT" not in environment:
            step = 16 * int(environment["SLURM_JOB_ID"]) + int(environment["SLURM_STEP_ID"])
            found["MASTER_PORT"] = str(_FIRST_PORT + step % _PORTS)
    except KeyError as error:
        raise OffbeatError(
            f"one of several tasks of Slurm, but {error.args[0]} is not set: start the workers "
            "with srun, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT for each"
        ) from None
    return found


def sharing(environment: Mapping[str, str], workers: int) -> int:
    """How many of the ``workers`` of this machine share the cores that this one may use.

    All, or one alone where Slurm has bound each task to cores of its own.
    """
    if not is_task(environment) or not hasattr(os, "sched_getaffinity"):
        return workers
    own = int(environment.get("SLURM_CPUS_PER_TASK", "1"))
    return 1 if len(os.sched_getaffinity(0)) <= own else workers


def _address(nodes: str, size: str) -> str:
    name = first_node(nodes)
    try:
        socket.getaddrinfo(name, None)
    except OSError as error:
        raise OffbeatError(
            f"one of {size} tasks of Slurm, which should meet on {name}, the first of {nodes}, but "
            f"that name has no address here ({error.strerror}): set MASTER_ADDR to the address of "
            "rank 0's machine"
        ) from None
    return name


def first_node(nodes: str) -> str:
    """``node07`` of ``node[07-09,12],gpu3``."""
    first = re.match(r"(?:\[[^\]]*\]|[^,\[])+", nodes)
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0] if first else nodes)


def _expand(counts: str) -> list[int]:
    """2, 2, 1 of ``2(x2),1``."""
    found: list[int] = []
    for one in counts.split(","):
        count, _, times = one.rstrip(")").partition("(x")
        found += [int(count)] * int(times or 1)
    return found
