"""Offbeat trains PyTorch models data-parallel on slow networks without waiting for them."""

from offbeat import data
from offbeat.attach import attach
from offbeat.errors import (
    AttachError,
    CommunicationError,
    CommunicationTimeout,
    MismatchError,
    OffbeatError,
)
from offbeat.schedule import LinearScalingWarmup
from offbeat.simulate import Compute, Network, Simulation, simulate
from offbeat.strategies import BSP, AsyncAveraging, LocalSGD, SelSync, Strategy, parse_strategy
from offbeat.synchronizer import Synchronizer
from offbeat.telemetry import JsonLines, Stats, TensorBoard

__version__ = "0.1.0"

__all__ = [
    "BSP",
    "AsyncAveraging",
    "AttachError",
    "CommunicationError",
    "CommunicationTimeout",
    "Compute",
    "JsonLines",
    "LinearScalingWarmup",
    "LocalSGD",
    "MismatchError",
    "Network",
    "OffbeatError",
    "SelSync",
    "Simulation",
    "Stats",
    "Strategy",
    "Synchronizer",
    "TensorBoard",
    "attach",
    "data",
    "parse_strategy",
    "simulate",
]
