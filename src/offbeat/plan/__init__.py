"""The planner: predicts the time of a training step under each strategy, and recommends one.

The code of the strategies runs in a simulation, on a small placeholder for the model. A plan
predicts time, traffic and memory. It does not predict the final metric, which only training shows.
"""

from offbeat.plan.forecast import Forecast
from offbeat.plan.planning import plan
from offbeat.plan.result import Plan

__all__ = ["Forecast", "Plan", "plan"]
