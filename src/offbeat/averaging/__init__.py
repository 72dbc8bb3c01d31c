"""Averaging of models or gradients over the workers.

A *flow* drives one strategy through the events of a training step. ``Worker`` holds the data and
the means of communication that a flow needs on one worker.
"""

from typing import Any

from offbeat.averaging.averager import RoundAverager
from offbeat.averaging.clocked import ClockedAverager
from offbeat.averaging.flow import Flow
from offbeat.averaging.gradient_flow import GradientFlow
from offbeat.averaging.replica import Replica
from offbeat.averaging.worker import AttachedOptimizer, NonFinite, Worker
from offbeat.strategies.base import CustomFlow, Gradients, Strategy

__all__ = ["AttachedOptimizer", "Flow", "NonFinite", "Replica", "Worker", "flow_of"]


def flow_of(strategy: Strategy, worker: Worker) -> Flow:
    """Return a new flow that drives ``strategy`` on ``worker``."""
    averages: Any = strategy.averages()
    if isinstance(averages, CustomFlow):
        averages.check(worker.size)
        flow: Flow = averages.make(strategy, worker)
        return flow
    if isinstance(averages, Gradients):
        return GradientFlow(strategy, worker)
    return (ClockedAverager if averages.eager else RoundAverager)(strategy, worker, averages)
