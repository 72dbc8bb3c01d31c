"""WHEN workers synchronize: one algorithm a file."""

from offbeat.strategies.async_averaging import AsyncAveraging
from offbeat.strategies.base import Strategy
from offbeat.strategies.bsp import BSP
from offbeat.strategies.diloco import DiLoCo
from offbeat.strategies.downpour import Downpour
from offbeat.strategies.easgd import EASGD
from offbeat.strategies.fedavg import FedAvg
from offbeat.strategies.local_sgd import LocalSGD
from offbeat.strategies.parse import STRATEGIES, parse_strategy
from offbeat.strategies.selsync import SelSync
from offbeat.strategies.ssp import SSP
from offbeat.strategies.streaming import StreamingAveraging

__all__ = [
    "BSP",
    "EASGD",
    "SSP",
    "STRATEGIES",
    "AsyncAveraging",
    "DiLoCo",
    "Downpour",
    "FedAvg",
    "LocalSGD",
    "SelSync",
    "Strategy",
    "StreamingAveraging",
    "parse_strategy",
]
