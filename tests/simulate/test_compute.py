"""How long a worker computes for a step."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from offbeat.simulate.compute import Compute


def test_a_step_takes_its_time() -> None:
    """Text or seconds; the default is 50 ms without jitter on every worker."""
    assert Compute().seconds(3, 100, 9.0, seed=5) == 0.05
    assert Compute("2ms").seconds(0, 0, 0.0, seed=0) == 0.002
    assert Compute("2ms") == Compute(0.002)


def test_slow_workers_take_longer() -> None:
    """A slowdown by rank lasts for the whole run; a factor below 1 is a faster worker."""
    compute = Compute(0.1, slowdown={1: 2, 2: 0.5})
    assert [compute.seconds(rank, 9, 9.0, seed=0) for rank in range(4)] == [0.1, 0.2, 0.05, 0.1]


def test_a_function_makes_workers_slow_for_a_while() -> None:
    """It gets the rank, the number of the step and the time of its start."""
    compute = Compute(2.0, slowdown=lambda rank, step, now: 1 + rank + 10 * step + 100 * now)
    assert compute.seconds(3, 2, 0.5, seed=0) == 2.0 * (1 + 3 + 20 + 50)
    with pytest.raises(ValueError, match=r"slowdown\(0, 1, 2.5\) must be positive and finite"):
        Compute(slowdown=lambda *_: 0.0).seconds(0, 1, 2.5, seed=0)


@pytest.mark.parametrize("jitter", [0.05, 0.5])
def test_jitter_is_log_normal(jitter: float) -> None:
    """Mean −σ²/2 and deviation σ of the logarithm, σ² = ln(1 + c²); unrelated over the ranks.

    So the mean of a step is 1, and its deviation is c. Earlier calls do not matter.
    """
    compute = Compute(1.0, jitter=jitter)
    logs = np.log(
        [[compute.seconds(rank, step, 0.0, 1) for step in range(3000)] for rank in (0, 1)]
    )
    sigma = math.sqrt(math.log(1 + jitter**2))
    assert logs.mean() == pytest.approx(-(sigma**2) / 2, abs=5 * sigma / math.sqrt(logs.size))
    assert logs.std() == pytest.approx(sigma, rel=0.05)
    assert abs(np.corrcoef(logs)[0, 1]) < 0.1
    again = Compute(1.0, jitter=jitter).seconds(1, 1234, 0.0, 1)
    assert again == compute.seconds(1, 1234, 0.0, 1) != compute.seconds(1, 1234, 0.0, 2)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Compute("50"), ValueError, "like 100us, 50ms"),
        (lambda: Compute(0), ValueError, "finite and positive"),
        (lambda: Compute(jitter=-0.1), ValueError, r"jitter must be in \[0, 1e\+06\]"),
        (lambda: Compute(jitter="10%"), TypeError, "jitter must be a number"),
        (lambda: Compute(slowdown={0: 0.0}), ValueError, r"slowdown\[0\] must be positive and"),
        (lambda: Compute(slowdown={-1: 2.0}), ValueError, "a rank in slowdown"),
        (lambda: Compute(slowdown={"0": 2.0}), TypeError, "a rank in slowdown"),
        (lambda: Compute(slowdown=[2.0]), TypeError, "slowdown must be a dictionary or a function"),
    ],
)
def test_impossible_computes_are_refused(
    make: Callable[[], object], error: type[Exception], message: str
) -> None:
    """The error names the argument and what is allowed."""
    with pytest.raises(error, match=message):
        make()
