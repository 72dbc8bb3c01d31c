"""Baselines: published strategies to compare with.

They take no ``wire``: the algorithm itself determines what its messages contain. They need a fixed
set of workers.
"""

from offbeat.baselines.downpour import Downpour
from offbeat.baselines.easgd import EASGD
from offbeat.baselines.fedavg import FedAvg
from offbeat.baselines.powersgd import PowerSGD
from offbeat.baselines.sparseloco import SparseLoCo
from offbeat.baselines.ssp import SSP

__all__ = [
    "EASGD",
    "SSP",
    "Downpour",
    "FedAvg",
    "PowerSGD",
    "SparseLoCo",
]
