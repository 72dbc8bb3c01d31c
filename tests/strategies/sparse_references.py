"""Reference of SparseLoCo, which sends some of the parameters.

Written without Offbeat, like ``references``. The parameters are one vector in the order of their
names.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from problems import PARAMETERS
from strategies.references import Reference, by_name


def largest_in_two_bits(chunk: Sequence[float], kept: int) -> list[float]:
    """The largest entries of a chunk, each with its sign and one of two float32 levels; else 0."""
    order = sorted(range(len(chunk)), key=lambda i: -abs(chunk[i]))[:kept]
    middle = sum(abs(chunk[i]) for i in order) / kept
    sent = [0.0] * len(chunk)
    for group in (
        [i for i in order if abs(chunk[i]) > middle],
        [i for i in order if abs(chunk[i]) <= middle],
    ):
        for i in group:
            level = float(np.float32(sum(abs(chunk[j]) for j in group) / len(group)))
            sent[i] = math.copysign(level, chunk[i])
    return sent


class SparseLoCo(Reference):
    """Algorithm 1, of one chunk: explicit pseudo-gradients P − x, and an outer SGD without v."""

    def __init__(
        self,
        counts: Sequence[int],
        kind: str,
        *,
        period: int,
        density: float,
        outer_lr: float = 1.0,
        decay: float = 0.95,
    ) -> None:
        super().__init__(counts, kind)
        self.period, self.lr, self.decay = period, outer_lr, decay
        self.kept = round(density * PARAMETERS)
        self.p = self.vectors()[0].clone()
        self.errors = [torch.zeros_like(self.p) for _ in counts]

    def advance(self) -> bool:
        self.local_steps()
        if self.time % self.period:
            return False
        sent = []
        for n, x in enumerate(self.vectors()):
            if self.news[0][n]:
                self.errors[n] = self.decay * self.errors[n] + (self.p - x)
                sent.append(
                    torch.tensor(
                        largest_in_two_bits(self.errors[n].tolist(), self.kept),
                        dtype=torch.float64,
                    )
                )
                self.errors[n] = self.errors[n] - sent[-1]
        self.p = self.p - self.lr * sum(sent) / len(sent)
        for model in self.sim.models:
            with torch.no_grad():
                nn.utils.vector_to_parameters(self.p.clone(), by_name(model))
        self.news = [[False] * self.size]
        self.launches += 1
        # Two levels, and 14 bits for each entry in words of 7 bytes; in units of 8 bytes.
        self.numbers += self.vote_numbers + (8 + 7 * math.ceil(self.kept / 4)) / 8
        return True
