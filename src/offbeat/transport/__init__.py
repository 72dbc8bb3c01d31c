"""Communication between workers: the communicator interface and its implementations."""

from offbeat.transport.accounting import Account, Accounting
from offbeat.transport.communicator import Communicator, Transport, Wrapper
from offbeat.transport.handle import Completed, Handle, explained
from offbeat.transport.host import Host, Promise
from offbeat.transport.single_process import SingleCommunicator
from offbeat.transport.team import Team
from offbeat.transport.torch_distributed import TorchCommunicator

__all__ = [
    "Account",
    "Accounting",
    "Communicator",
    "Completed",
    "Handle",
    "Host",
    "Promise",
    "SingleCommunicator",
    "Team",
    "TorchCommunicator",
    "Transport",
    "Wrapper",
    "explained",
]
