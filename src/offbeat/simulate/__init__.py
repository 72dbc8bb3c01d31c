"""The simulator: real training on a simulated cluster.

Durations are measured in *virtual time*, the simulator's clock, and not on this machine.
"""

from offbeat.simulate.cluster import Span
from offbeat.simulate.compute import Compute
from offbeat.simulate.faults import Join, Kill
from offbeat.simulate.network import Network
from offbeat.simulate.run import simulate
from offbeat.simulate.simulation import Simulation
from offbeat.simulate.workers import DeadlockError

__all__ = [
    "Compute",
    "DeadlockError",
    "Join",
    "Kill",
    "Network",
    "Simulation",
    "Span",
    "simulate",
]
