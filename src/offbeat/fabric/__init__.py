"""HOW workers exchange bytes: the seam, its implementations, what is built on it."""

from offbeat.fabric.accounting import Account, Accounting
from offbeat.fabric.communicator import Communicator, Transport, Wrapper
from offbeat.fabric.connect import open_communicator
from offbeat.fabric.handle import Completed, Handle, explained
from offbeat.fabric.host import Host, Promise
from offbeat.fabric.nodes import NodeEnds, NodeGroup, open_nodes
from offbeat.fabric.regroup_join import join
from offbeat.fabric.single import SingleCommunicator
from offbeat.fabric.team import Team
from offbeat.fabric.torch_distributed import TorchCommunicator
from offbeat.fabric.wire import Wire

__all__ = [
    "Account",
    "Accounting",
    "Communicator",
    "Completed",
    "Handle",
    "Host",
    "NodeEnds",
    "NodeGroup",
    "Promise",
    "SingleCommunicator",
    "Team",
    "TorchCommunicator",
    "Transport",
    "Wire",
    "Wrapper",
    "explained",
    "join",
    "open_communicator",
    "open_nodes",
]
