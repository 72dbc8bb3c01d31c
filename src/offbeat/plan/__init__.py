"""Which strategy to try first: the strategies' own code, run in virtual time on a phantom model.

A prediction of time alone. It knows nothing of the final metric, which a run has to tell.
"""

from offbeat.plan.forecast import Forecast
from offbeat.plan.planning import plan
from offbeat.plan.result import Plan

__all__ = ["Forecast", "Plan", "plan"]
