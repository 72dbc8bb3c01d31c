"""Baselines: strategies to compare with. They send exact messages between fixed workers."""

from offbeat.baselines.downpour import Downpour
from offbeat.baselines.easgd import EASGD
from offbeat.baselines.fedavg import FedAvg
from offbeat.baselines.ssp import SSP

__all__ = ["EASGD", "SSP", "Downpour", "FedAvg"]
