"""Strategies for training, one algorithm per module. ``base`` defines their interface."""

from offbeat.strategies.async_averaging import AsyncAveraging
from offbeat.strategies.base import Strategy
from offbeat.strategies.bsp import BSP
from offbeat.strategies.diloco import DiLoCo
from offbeat.strategies.local_sgd import LocalSGD
from offbeat.strategies.selsync import SelSync
from offbeat.strategies.streaming import StreamingAveraging

__all__ = [
    "BSP",
    "AsyncAveraging",
    "DiLoCo",
    "LocalSGD",
    "SelSync",
    "Strategy",
    "StreamingAveraging",
]
