"""A model of constants, in which a mean that was applied in part is visible."""

import random
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.soak.plan import Case
from offbeat.averaging.averager import Averager

RATE = 1 / 64
"""Learning rate."""


class Constant(nn.Module):
    """A model whose numbers are all equal, and so are their gradients.

    It has two dtypes, so there are two buckets.

    Args:
        elements: Approximate number of parameters.
    """

    def __init__(self, elements: int) -> None:
        super().__init__()
        # One bucket arrives long before the other, which leaves time for a fault between them.
        sizes = {"a": (elements // 20, torch.float32), "b": (7, torch.float64)}
        sizes |= {"c": (elements, torch.float64), "d": (5, torch.float32)}
        for name, (size, dtype) in sizes.items():
            setattr(self, name, nn.Parameter(torch.full((size,), 1.0, dtype=dtype)))

    def forward(self, gradient: float) -> Tensor:
        """Return a loss with this gradient for every number."""
        loss: Tensor = sum(p.double().sum() for p in self.parameters()) * gradient
        return loss


def regions(sync: Any) -> list[list[Tensor]]:
    """Return groups of tensors; the numbers of a group are equal because they move together."""
    flow = sync._iteration.flow
    if not isinstance(flow, Averager):
        return [[p.detach() for _, p in sync._worker.replica.parameters]]
    pieces = (piece for part in flow.parts for whole in part.slices for piece in whole.pieces())
    return [list(piece.space.x.numbers(piece.start, piece.stop)) for piece in pieces]


def spread_of(sync: Any) -> float:
    """Return the largest relative difference between numbers that must be equal."""
    found = 0.0
    for tensors in filter(None, regions(sync)):
        low = min(float(t.detach().min()) for t in tensors)
        high = max(float(t.detach().max()) for t in tensors)
        found = max(found, (high - low) / (1 + abs(high)))
    return found


def gradient(case: Case, rank: int, step: int) -> float:
    """Return the gradient of a worker's step: far from the other workers', and exact in binary."""
    draw = random.Random(f"{case.seed} {rank} {step}")
    return draw.choice((-1, 1)) * (1 + draw.randrange(64) / 64) * 2.0**rank
