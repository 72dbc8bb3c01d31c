"""HOW workers exchange bytes: the communicator seam and its implementations."""

from offbeat.fabric.accounting import Accounting
from offbeat.fabric.communicator import Communicator, Completed, Handle
from offbeat.fabric.single import SingleCommunicator
from offbeat.fabric.torch_distributed import TorchCommunicator

__all__ = [
    "Accounting",
    "Communicator",
    "Completed",
    "Handle",
    "SingleCommunicator",
    "TorchCommunicator",
]
