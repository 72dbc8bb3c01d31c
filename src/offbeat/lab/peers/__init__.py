"""Methods that others wrote and that run their own code here, to be compared with.

Torch's are always there. The others are in packages of their own, the extra ``peers``.
"""

from offbeat.lab.peers.accelerate import AccelerateLocalSGD
from offbeat.lab.peers.base import Peer
from offbeat.lab.peers.ddp import DDP, Accumulate, PostLocal
from offbeat.lab.peers.torchft import TorchftDiLoCo, TorchftLocalSGD

PEERS: tuple[type[Peer], ...] = (
    DDP,
    PostLocal,
    Accumulate,
    TorchftLocalSGD,
    TorchftDiLoCo,
    AccelerateLocalSGD,
)
"""All of them."""

PREFIXES = tuple(dict.fromkeys(one.name.partition(":")[0] + ":" for one in PEERS))
"""What their names begin with, as ``torch:``."""

__all__ = ["DDP", "PEERS", "PREFIXES", "Accumulate", "Peer", "PostLocal"]
