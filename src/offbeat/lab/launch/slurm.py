"""Workers started by Slurm's ``srun``: its variables, translated to those of torchrun.

A batch script has ``SLURM_NTASKS``, too, but runs once. Only a job step, which ``srun`` starts, has
several tasks; its variables begin with ``SLURM_STEP``.
"""

import os
import re
import socket
from collections.abc import Mapping

from offbeat.errors import OffbeatError

_FIRST_PORT, _PORTS = 15000, 15000  # below the range that Linux assigns to clients


def is_task(environment: Mapping[str, str]) -> bool:
    """Return True if this process is one of several tasks of ``srun`` and not one of torchrun's."""
    several = int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1
    return several and "TORCHELASTIC_RUN_ID" not in environment


def torchrun_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that torchrun would set for this task.

    The address is the first node of the step, which has rank 0 unless tasks are placed by hand. The
    port lies between 15000 and 29999 and is computed from the numbers of job and step.
    ``MASTER_ADDR`` and ``MASTER_PORT`` override them.

    Returns:
        The missing variables; none if ``RANK`` is set or ``is_task`` is False.

    Raises:
        OffbeatError: a variable of Slurm is missing, or the node's name has no address.
    """
    if "RANK" in environment or not is_task(environment):
        return {}
    try:
        size, node = environment["SLURM_STEP_NUM_TASKS"], int(environment["SLURM_NODEID"])
        variables = {
            "RANK": environment["SLURM_PROCID"],
            "WORLD_SIZE": size,
            "LOCAL_RANK": environment["SLURM_LOCALID"],
            "LOCAL_WORLD_SIZE": str(_expand(environment["SLURM_STEP_TASKS_PER_NODE"])[node]),
        }
        if "MASTER_ADDR" not in environment:
            variables["MASTER_ADDR"] = _first_address(environment["SLURM_STEP_NODELIST"], size)
        if "MASTER_PORT" not in environment:
            step = 16 * int(environment["SLURM_JOB_ID"]) + int(environment["SLURM_STEP_ID"])
            variables["MASTER_PORT"] = str(_FIRST_PORT + step % _PORTS)
    except KeyError as error:
        raise OffbeatError(
            f"this is one of several Slurm tasks, but {error.args[0]} is not set: start the "
            "workers with srun, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT "
            "for each"
        ) from None
    return variables


def workers_sharing_cores(environment: Mapping[str, str], workers: int) -> int:
    """Return how many of this machine's ``workers`` share the cores that this process may use.

    That is 1 if Slurm has bound each task to its own cores, else ``workers``.
    """
    if not is_task(environment) or not hasattr(os, "sched_getaffinity"):
        return workers
    bound = len(os.sched_getaffinity(0)) <= int(environment.get("SLURM_CPUS_PER_TASK", "1"))
    return 1 if bound else workers


def _first_address(nodes: str, size: str) -> str:
    name = first_node(nodes)
    try:
        socket.getaddrinfo(name, None)
    except OSError as error:
        raise OffbeatError(
            f"this is one of {size} Slurm tasks, which should connect to {name}, the first of "
            f"{nodes}, but that name has no address here ({error.strerror}): set MASTER_ADDR to "
            "the address of rank 0's machine"
        ) from None
    return name


def first_node(nodes: str) -> str:
    """Return the first name of a node list: ``node07`` of ``node[07-09,12],gpu3``."""
    first = re.match(r"(?:\[[^\]]*\]|[^,\[])+", nodes)
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0] if first else nodes)


def _expand(counts: str) -> list[int]:
    """Return the counts 2, 2, 1 of ``2(x2),1``."""
    parts = (part.rstrip(")").partition("(x") for part in counts.split(","))
    return [int(count) for count, _, times in parts for _ in range(int(times or 1))]
