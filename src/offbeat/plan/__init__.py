"""Plan: predict the time of a step under each strategy and recommend one.

The strategies' own code runs in virtual time on a placeholder model. The plan predicts time alone;
only a training shows the final metric.
"""

from offbeat.plan.forecast import Forecast
from offbeat.plan.planning import plan
from offbeat.plan.result import Plan

__all__ = ["Forecast", "Plan", "plan"]
