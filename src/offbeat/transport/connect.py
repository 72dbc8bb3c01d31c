"""Opens a communicator between the members of a process group, or from a custom transport."""

import logging
import os

import torch.distributed as dist

from offbeat.errors import AttachError
from offbeat.transport.communicator import Communicator, Transport
from offbeat.transport.single_process import SingleCommunicator
from offbeat.transport.torch_backend.network_interface import interface_in_use
from offbeat.transport.torch_backend.torch_distributed import TorchCommunicator

logger = logging.getLogger("offbeat")


def open_communicator(
    group: dist.ProcessGroup | Transport | None,
    timeout_seconds: float,
    *,
    what: str,
    elastic: bool = False,
) -> Communicator:
    """Open a new communicator between the members of ``group``. A collective.

    Args:
        group: Process group of ``torch.distributed``, or a ``Transport`` that makes the
            communicator. None is the default process group. If there is none, and no launcher's
            environment variable says otherwise, this process is the only worker.
        timeout_seconds: Time limit of one operation.
        what: Name of the caller, for error messages.
        elastic: True if the communicator must have a ``membership``, the interface through which
            the workers agree on who continues. A process group cannot provide one.

    Raises:
        AttachError: ``torch.distributed`` is not initialised in a process of several; this process
            is not a member of the group; or a ``membership`` is needed, and there is none.
        CommunicationError: A worker did not open its connections in time.
        TypeError: The transport did not return a communicator.
    """
    if group is None:
        group = dist.group.WORLD  # None without a default group; a transport in a simulation
    make = getattr(group, "make_communicator", None)
    if make is not None:
        made = make(timeout_seconds)
        if not isinstance(made, Communicator):
            raise TypeError(f"make_communicator() must return a Communicator, got {made!r}")
        if elastic and made.membership is None:
            made.close()
            raise AttachError(
                f"{what} with min_workers: a {type(made).__name__} has no membership, so the "
                "workers cannot agree on who continues; leave min_workers out"
            )
        return made
    if elastic:
        raise AttachError(
            f"{what} with min_workers: workers cannot leave or join a process group; start the "
            "script with offbeat run, and give attach() no group"
        )
    if not dist.is_initialized():
        name, size = _launched_processes()
        if group is None and size == "1":
            logger.warning("%s without a process group: this process trains alone", what)
            return SingleCommunicator(timeout_seconds)
        raise AttachError(
            "torch.distributed is not initialised: call torch.distributed.init_process_group() "
            f"before {what}, and start the script with torchrun (here: {name}={size})"
        )
    assert group is None or isinstance(group, dist.ProcessGroup)
    if dist.get_world_size(group) == 1:
        return SingleCommunicator(timeout_seconds)
    communicator = TorchCommunicator(group, timeout_seconds=timeout_seconds)
    if communicator.rank == 0:
        logger.info("%d workers over gloo on %s", communicator.size, interface_in_use())
    return communicator


def _launched_processes() -> tuple[str, str]:
    """Return the first variable that says how many processes were launched together, and it.

    torchrun sets ``WORLD_SIZE``, and ``srun`` and ``mpirun`` set the others. Without any of them:
    ``WORLD_SIZE`` and "1".
    """
    for name in ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        if name in os.environ:
            return name, os.environ[name]
    return "WORLD_SIZE", "1"
