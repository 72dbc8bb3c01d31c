"""Which communicator belongs to a process group."""

import torch.distributed as dist

from offbeat.errors import AttachError
from offbeat.fabric.communicator import Communicator
from offbeat.fabric.single import SingleCommunicator
from offbeat.fabric.torch_distributed import TorchCommunicator


def open_communicator(
    group: dist.ProcessGroup | None, timeout_seconds: float, *, what: str
) -> Communicator:
    """A communicator of its own for the members of ``group``. A collective.

    Args:
        group: A real or a simulated group; None is the default group.
        timeout_seconds: How long one operation may take.
        what: Who asks, for the error.

    Raises:
        AttachError: no process group was initialised.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise AttachError(
            "torch.distributed is not initialised: call torch.distributed.init_process_group() "
            f"before {what}, and start the script with torchrun"
        )
    make = getattr(group or dist.group.WORLD, "make_communicator", None)
    if make is not None:  # a simulated group
        made: Communicator = make()
        return made
    if dist.get_world_size(group) == 1:
        return SingleCommunicator()
    return TorchCommunicator(group, timeout_seconds=timeout_seconds)
