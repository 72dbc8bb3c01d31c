"""What the workers of a node cost one another: before and after what travels between nodes."""

import math
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

from offbeat.costs import all_gather_seconds, all_reduce_seconds

_WIDTH, _REACH = 0.01, 1000  # of the trapezoidal rule, whose error is far below 1e-9 here


@dataclass(frozen=True, kw_only=True)
class NodeCosts:
    """A node of several workers, as ``attach(..., node_group=…)`` lets them train.

    Attributes:
        workers: L.
        bytes_per_second: B_i, of each worker's link inside the node, in each direction.
        latency_seconds: α_i.
        step_seconds: A step of one worker, computed alone.
    """

    workers: int
    bytes_per_second: float
    latency_seconds: float
    step_seconds: float

    def gather_seconds(self, size: float) -> float:
        """(L−1)·(α_i + S/(L·B_i)): the parts of a result of S bytes are put together."""
        part, workers = size / self.workers, self.workers
        return all_gather_seconds(part, workers, self.bytes_per_second, self.latency_seconds)

    def agree_seconds(self, numbers: int) -> float:
        """2(L−1)·(α_i + 8·numbers/(L·B_i)): ``Team.agree``."""
        network = self.workers, self.bytes_per_second, self.latency_seconds
        return all_reduce_seconds(8 * numbers, *network)


@cache
def maximum_of_normals(workers: int) -> tuple[float, float]:
    """Mean and standard deviation of the largest of N independent standard normal numbers.

    ∫ z·N·φ(z)·Φ(z)^(N−1) dz and the same of z² by the trapezoidal rule; 0 and 1 for one.
    """
    if workers == 1:
        return 0.0, 1.0
    normal, first, second = NormalDist(), 0.0, 0.0
    for i in range(-_REACH, _REACH + 1):
        z = _WIDTH * i
        weight = _WIDTH * workers * normal.pdf(z) * normal.cdf(z) ** (workers - 1)
        first += z * weight
        second += z * z * weight
    return first, math.sqrt(second - first * first)
