"""The bound of asynchronous averaging; ``test_conformance`` compares it with Algorithm 2."""

import torch
from torch import Tensor, nn

from loops import attach
from offbeat import AsyncAveraging
from worlds import run


def bounded(rank: int, size: int, steps: int) -> list[Tensor]:
    """SGD with gradients of norm exactly 1, in a direction of the worker's own."""
    model = nn.Module()
    model.x = nn.Parameter(torch.zeros(40, dtype=torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = attach(model, optimizer, AsyncAveraging(staleness=8))
    generator = torch.Generator().manual_seed(rank)
    drift = torch.randn(40, generator=generator, dtype=torch.float64)
    seen = []
    for _ in range(steps):
        noise = torch.randn(40, generator=generator, dtype=torch.float64)
        gradient = drift + 0.3 * noise
        model.x.grad = gradient / gradient.norm()
        optimizer.step()
        seen.append(model.x.detach().clone())
    sync.finish()
    return seen


def test_lemma_3_3_the_distance_is_bounded_and_independent_of_n() -> None:
    """‖x_n − x_m‖ ≤ 2·L·τ·η, and eight workers are no further apart than two."""
    largest = {}
    for workers in (2, 8):
        results = run(bounded, 40, workers=workers)
        largest[workers] = max(
            float((a - b).norm())
            for models in zip(*results, strict=True)
            for i, a in enumerate(models)
            for b in models[:i]
        )
        assert largest[workers] <= 2 * 1.0 * 8 * 0.1
    assert largest[8] <= 1.25 * largest[2]  # the maximum is over 28 pairs instead of 1
