"""A model of constants, in which a mean that was applied in part is visible."""

import random
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.soak.plan import Case
from offbeat.averaging.model_flow import ModelFlow
from offbeat_lab.baselines.server_strategy import ServerFlow

RATE = 1 / 64
"""Learning rate."""


class Constant(nn.Module):
    """A model whose numbers are all equal, and so are their gradients.

    It has two dtypes, so there are two buckets.

    Args:
        elements: Approximate number of parameters.
        counts: True to count steps: the parameter ``steps`` has the gradient 1 on every worker, so
            that it moves by the same amount in each step, whatever workers take part in the means.
    """

    def __init__(self, elements: int, *, counts: bool = False) -> None:
        super().__init__()
        # One bucket arrives long before the other, which leaves time for a fault between them.
        sizes = {"a": (elements // 20, torch.float32), "b": (7, torch.float64)}
        sizes |= {"c": (elements, torch.float64), "d": (5, torch.float32)}
        for name, (size, dtype) in sizes.items():
            setattr(self, name, nn.Parameter(torch.full((size,), 1.0, dtype=dtype)))
        self.steps = nn.Parameter(torch.zeros(3, dtype=torch.float64)) if counts else None

    def forward(self, gradient: float) -> Tensor:
        """Return a loss with this gradient for every number."""
        loss = sum(p.double().sum() for p in self.parameters() if p is not self.steps) * gradient
        return loss if self.steps is None else loss + self.steps.sum()


def regions(sync: Any) -> list[list[Tensor]]:
    """Return groups of tensors; the numbers of a group are equal because they travel together."""
    flow = sync._iteration.flow
    named = [(name, p.detach()) for name, p in sync._worker.replica.parameters]
    counters = {p.data_ptr() for name, p in named if name == "steps"}
    if isinstance(flow, ModelFlow):
        return [
            [
                t
                for b in part.buckets[: part.parameter_buckets]
                for t in b.parameters
                if t.data_ptr() not in counters
            ]
            for part in flow.pipeline.parts
        ]
    if not isinstance(flow, ServerFlow):
        return [[p for name, p in named if name != "steps"]]
    shards = [*flow.server._slices.values()]
    pieces: list[list[Tensor]] = [[] for _ in shards]
    start = 0
    for name, tensor in named:
        for i, shard in enumerate(shards):
            low, high = max(shard.start, start), min(shard.stop, start + tensor.numel())
            if low < high and name != "steps":
                pieces[i].append(tensor[low - start : high - start])
        start += tensor.numel()
    return pieces


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
