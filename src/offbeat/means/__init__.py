"""WHAT is averaged: the tensors of a model, as they are, as they move, and while they travel."""

from offbeat.means.gradient_mean import GradientMean
from offbeat.means.in_flight import InFlight, Outer
from offbeat.means.model_mean import ModelMean
from offbeat.means.optimizer_state import OptimizerState
from offbeat.means.replica import Replica

__all__ = ["GradientMean", "InFlight", "ModelMean", "OptimizerState", "Outer", "Replica"]
