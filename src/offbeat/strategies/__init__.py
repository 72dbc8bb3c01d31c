"""WHEN workers synchronize: one algorithm a file."""

from offbeat.strategies.async_averaging import AsyncAveraging
from offbeat.strategies.base import Strategy
from offbeat.strategies.bsp import BSP
from offbeat.strategies.local_sgd import LocalSGD
from offbeat.strategies.parse import STRATEGIES, parse_strategy
from offbeat.strategies.selsync import SelSync

__all__ = [
    "BSP",
    "STRATEGIES",
    "AsyncAveraging",
    "LocalSGD",
    "SelSync",
    "Strategy",
    "parse_strategy",
]
