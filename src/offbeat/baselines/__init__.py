"""Baselines: published strategies to compare with.

They do not quantize their messages, and they need a fixed set of workers.
"""

from offbeat.baselines.desloc import DesLoc
from offbeat.baselines.downpour import Downpour
from offbeat.baselines.easgd import EASGD
from offbeat.baselines.fedavg import FedAvg
from offbeat.baselines.ssp import SSP

__all__ = ["EASGD", "SSP", "DesLoc", "Downpour", "FedAvg"]
