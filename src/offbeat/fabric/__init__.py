"""HOW workers exchange bytes: the seam, its implementations, what is built on it."""

from offbeat.fabric.accounting import Accounting
from offbeat.fabric.communicator import Communicator, Completed, Handle, Promise
from offbeat.fabric.compression import Wire
from offbeat.fabric.opening import open_communicator
from offbeat.fabric.single import SingleCommunicator
from offbeat.fabric.torch_distributed import TorchCommunicator

__all__ = [
    "Accounting",
    "Communicator",
    "Completed",
    "Handle",
    "Promise",
    "SingleCommunicator",
    "TorchCommunicator",
    "Wire",
    "open_communicator",
]
