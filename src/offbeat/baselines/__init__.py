"""Baselines: published strategies to compare with.

They take no ``wire``: the algorithm itself determines what its messages contain. They need a fixed
set of workers.
"""

from offbeat.baselines.async_diloco import AsyncDiLoCo
from offbeat.baselines.desloc import DesLoc
from offbeat.baselines.downpour import Downpour
from offbeat.baselines.easgd import EASGD
from offbeat.baselines.fedavg import FedAvg
from offbeat.baselines.powersgd import PowerSGD
from offbeat.baselines.sparseloco import SparseLoCo
from offbeat.baselines.sparta import SPARTA
from offbeat.baselines.ssp import SSP

__all__ = [
    "EASGD",
    "SPARTA",
    "SSP",
    "AsyncDiLoCo",
    "DesLoc",
    "Downpour",
    "FedAvg",
    "PowerSGD",
    "SparseLoCo",
]
