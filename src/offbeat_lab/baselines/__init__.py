"""Baselines: published strategies to compare with.

They take no ``wire``: the algorithm itself determines what its messages contain. They need a fixed
set of workers.
"""

from collections.abc import Mapping

from offbeat import Strategy
from offbeat.extend import STRATEGIES as TO_TRAIN_WITH
from offbeat_lab.baselines.downpour import Downpour
from offbeat_lab.baselines.easgd import EASGD
from offbeat_lab.baselines.fedavg import FedAvg
from offbeat_lab.baselines.gradient_selsync import GradientSelSync
from offbeat_lab.baselines.powersgd import PowerSGD
from offbeat_lab.baselines.sparseloco import SparseLoCo
from offbeat_lab.baselines.ssp import SSP

__all__ = [
    "EASGD",
    "PUBLISHED",
    "SSP",
    "STRATEGIES",
    "Downpour",
    "FedAvg",
    "GradientSelSync",
    "PowerSGD",
    "SparseLoCo",
]

PUBLISHED: Mapping[str, type[Strategy]] = {
    s.name: s for s in (FedAvg, SSP, Downpour, EASGD, SparseLoCo, PowerSGD, GradientSelSync)
}
"""The baselines by name."""
STRATEGIES = {**TO_TRAIN_WITH, **PUBLISHED}
"""Strategy classes by name: the strategies of Offbeat, and the baselines."""
