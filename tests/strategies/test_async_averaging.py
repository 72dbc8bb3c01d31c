"""The lemmas of asynchronous averaging; ``test_conformance`` compares it with Algorithm 2."""

from typing import Any

import torch
from torch import Tensor, nn

from loops import attach, close
from offbeat import AsyncAveraging
from problems import OPTIMIZERS, flat, make_batch, make_model, train_step
from strategies.references import AsyncAveraging as Reference
from worlds import run


def train(rank: int, size: int, strategy: AsyncAveraging, steps: int) -> Any:
    """The model before and after each step boundary."""
    model = make_model(seed=rank)
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    before: list[Tensor] = []
    optimizer.register_step_post_hook(lambda *_: before.append(flat(model)))
    after: list[Tensor] = []
    with attach(model, optimizer, strategy):
        for step in range(steps):
            train_step(model, optimizer, make_batch(rank, step))
            after.append(flat(model))
    return before, after


def test_lemmas_3_1_and_3_2() -> None:
    """A reset keeps the mean over workers, and P_{j+1} is the mean of x at the end of cycle j."""
    results = run(train, AsyncAveraging(staleness=6), 21, workers=3)
    reference, moved = Reference([21] * 3, "momentum", staleness=6), []
    for step in range(21):
        reference.step()
        before = [before[step] for before, _ in results]
        after = [after[step] for _, after in results]
        close(sum(before) / 3, sum(after) / 3)
        moved.append(not torch.equal(before[0], after[0]))
    assert [step for step, reset in enumerate(moved, 1) if reset] == [6, 9, 12, 15, 18, 21]
    for cycle in range(6):
        mean = sum(after[3 * cycle + 2] for _, after in results) / 3
        close(mean, reference.servers[cycle + 1], 1e-11)


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
