"""Which communicator belongs to a process group: the one door for every transport."""

import logging

import torch.distributed as dist

from offbeat.elastic.agreement import open_elastic
from offbeat.errors import AttachError
from offbeat.transport.communicator import Communicator, Transport
from offbeat.transport.membership import membership_of
from offbeat.transport.network_interface import interface_in_use
from offbeat.transport.single_process import SingleCommunicator
from offbeat.transport.torch_distributed import TorchCommunicator

logger = logging.getLogger("offbeat")


def open_communicator(
    group: dist.ProcessGroup | Transport | None,
    timeout_seconds: float,
    *,
    what: str,
    regroups: bool = False,
) -> Communicator:
    """A communicator of its own for the members of ``group``. A collective.

    Args:
        group: A process group of ``torch.distributed``, or whatever makes communicators by itself
            (``Transport``); None is the default group.
        timeout_seconds: How long one operation may take.
        what: Who asks, for the error.
        regroups: Whether it must have a ``membership``.

    Raises:
        AttachError: no process group was initialised, or there is no ``membership``.
        TypeError: what a transport made is no communicator.
    """
    made = _open(group, timeout_seconds, what=what, regroups=regroups)
    if regroups and membership_of(made) is None:
        made.close()
        raise AttachError(
            f"{what} with min_workers: a {type(made).__name__} has no membership, so the workers "
            "cannot agree on who continues; leave min_workers out"
        )
    return made


def _open(
    group: dist.ProcessGroup | Transport | None,
    timeout_seconds: float,
    *,
    what: str,
    regroups: bool,
) -> Communicator:
    make = getattr(group, "make_communicator", None)
    if make is None and not (dist.is_available() and dist.is_initialized()):
        raise AttachError(
            "torch.distributed is not initialised: call torch.distributed.init_process_group() "
            f"before {what}, and start the script with torchrun"
        )
    if group is None:
        make = getattr(dist.group.WORLD, "make_communicator", None)  # that of the simulator
    if make is not None:
        made = make(timeout_seconds)
        if not isinstance(made, Communicator):
            raise TypeError(f"make_communicator() must return a Communicator, got {made!r}")
        return made
    assert group is None or isinstance(group, dist.ProcessGroup)
    communicator: Communicator
    if regroups:
        communicator = open_elastic(group, timeout_seconds)
    elif dist.get_world_size(group) == 1:
        return SingleCommunicator(timeout_seconds)
    else:
        communicator = TorchCommunicator(group, timeout_seconds=timeout_seconds)
    if communicator.rank == 0:
        backend = str(dist.get_backend(group))
        interface = interface_in_use(backend)
        logger.info("%d workers over %s on %s", communicator.size, backend, interface)
    return communicator
