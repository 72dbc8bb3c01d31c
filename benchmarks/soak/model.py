"""A model of constants: whatever is exchanged by halves can be seen in it."""

import random
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.soak.plan import Case
from offbeat.averaging.model_flow import ModelFlow
from offbeat.baselines.server_strategy import ServerFlow

RATE = 1 / 64  # of learning


class Constant(nn.Module):
    """All numbers are the same, and so are their gradients: in two dtypes, so two buckets.

    Args:
        elements: About how many numbers.
        counts: Whether it counts steps, too: ``steps`` has the gradient 1 on every worker, so that
            it has gone as far as each of them has stepped, whoever takes part in which mean.
    """

    def __init__(self, elements: int, *, counts: bool = False) -> None:
        super().__init__()
        # One bucket is there long before the other: time enough for a fault between them.
        sizes = {"a": (elements // 20, torch.float32), "b": (7, torch.float64)}
        sizes |= {"c": (elements, torch.float64), "d": (5, torch.float32)}
        for name, (size, dtype) in sizes.items():
            setattr(self, name, nn.Parameter(torch.full((size,), 1.0, dtype=dtype)))
        self.steps = nn.Parameter(torch.zeros(3, dtype=torch.float64)) if counts else None

    def forward(self, gradient: float) -> Tensor:
        """A loss with this gradient everywhere."""
        loss = sum(p.double().sum() for p in self.parameters() if p is not self.steps) * gradient
        return loss if self.steps is None else loss + self.steps.sum()


def regions(sync: Any) -> list[list[Tensor]]:
    """Tensors whose numbers are all the same at any time, because they are exchanged together."""
    flow = sync._iteration.flow
    named = [(name, p.detach()) for name, p in sync._worker.replica.parameters]
    apart = {p.data_ptr() for name, p in named if name == "steps"}
    if isinstance(flow, ModelFlow):
        return [
            [
                t
                for b in part.buckets[: part.parameter_buckets]
                for t in b.parameters
                if t.data_ptr() not in apart
            ]
            for part in flow.pipeline.parts
        ]
    if not isinstance(flow, ServerFlow):
        return [[p for name, p in named if name != "steps"]]
    places = [*flow.server._slices.values()]
    pieces: list[list[Tensor]] = [[] for _ in places]
    start = 0
    for name, tensor in named:
        for i, place in enumerate(places):
            low, high = max(place.start, start), min(place.stop, start + tensor.numel())
            if low < high and name != "steps":
                pieces[i].append(tensor[low - start : high - start])
        start += tensor.numel()
    return pieces


def spread_of(sync: Any) -> float:
    """How far numbers are apart that must be equal, relative to their size."""
    found = 0.0
    for tensors in regions(sync):
        if not tensors:
            continue
        low = min(float(t.detach().min()) for t in tensors)
        high = max(float(t.detach().max()) for t in tensors)
        found = max(found, (high - low) / (1 + abs(high)))
    return found


def gradient(case: Case, rank: int, step: int) -> float:
    """Of this worker in this step: very different from the others', and exact in binary."""
    draw = random.Random(f"{case.seed} {rank} {step}")
    return draw.choice((-1, 1)) * (1 + draw.randrange(64) / 64) * 2.0**rank
