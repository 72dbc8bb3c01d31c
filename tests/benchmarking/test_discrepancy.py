"""Where the discrepancy is measured, on a problem whose models can be written down."""

import math
from collections.abc import Iterator

import pytest
import torch
from benchmarks.papers.discrepancy import (
    Problem,
    distances,
    equal_gradients,
    gradient_delay,
    independent_gradients,
    slope,
)
from torch import nn


def linear() -> Problem:
    """Two parameters at 0; worker n's gradient is always (1, n)."""

    class Point(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x = nn.Parameter(torch.zeros(2))

    def batches(workers: int, rank: int, seed: int) -> Iterator[torch.Tensor]:
        while True:
            yield torch.tensor([1.0, float(rank)])

    return Problem(Point, batches, lambda model, batch: (model.x * batch).sum(), 0.5)


@pytest.mark.parametrize("staleness", [2, 4, 8])
@pytest.mark.parametrize("workers", [2, 4])
def test_the_distance_is_that_of_all_own_steps(staleness: int, workers: int):
    """Just before a reset: τ steps of 0.5·|n − mean(n)|, not the τ/2 that are left after it."""
    found = distances(linear(), workers=workers, staleness=staleness, steps=32, seed=0)
    apart = sum(abs(n - (workers - 1) / 2) for n in range(workers)) / workers
    assert found == pytest.approx(
        {"early": staleness * 0.5 * apart, "late": staleness * 0.5 * apart}
    )


@pytest.mark.parametrize("workers", [2, 5])
def test_gradient_delay_grows_with_the_workers(workers: int):
    """Worker k is N − 1 − k steps of 0.5 behind the newest: (N − 1)/2 on average."""
    found = gradient_delay(linear(), workers=workers, steps=40, seed=0)
    assert found == pytest.approx({"early": (workers - 1) / 4, "late": (workers - 1) / 4})


def test_the_two_extremes_of_gradient_delay():
    assert equal_gradients(5) == 2.0
    assert independent_gradients(3) == pytest.approx((1 + math.sqrt(2)) / 3)


def test_a_slope_is_the_exponent():
    assert slope([1, 2, 4], [3, 6, 12]) == pytest.approx(1)
    assert slope([1, 2, 4], [5, 5, 5]) == pytest.approx(0)
