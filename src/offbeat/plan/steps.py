"""How long workers compute for a step, and nodes until they have the mean of their gradients."""

import numpy as np
from numpy.typing import NDArray


class Steps:
    """The seconds of a step of one worker, or of one node.

        max over the workers of the node (t · jitter) + tail

    Attributes:
        seconds: t, computing of one worker.
        jitter: Standard deviation of a step / t, log-normal.
        workers: Workers of a node; 1 without nodes.
        tail: Seconds from the end of computing to the mean of the gradients of a node.
    """

    def __init__(self, seconds: float, jitter: float, workers: int = 1, tail: float = 0.0) -> None:
        self.seconds, self.jitter, self.workers, self.tail = seconds, jitter, workers, tail
        variance = np.log1p(jitter**2)
        self._normal = -variance / 2, np.sqrt(variance)

    def draw(self, random: np.random.Generator, count: int) -> NDArray[np.float64]:
        """Computing of a step of so many workers or nodes."""
        if not self.jitter:
            return np.full(count, self.seconds)
        factors = random.lognormal(*self._normal, size=(count, self.workers))
        drawn: NDArray[np.float64] = self.seconds * factors.max(axis=1)
        return drawn
