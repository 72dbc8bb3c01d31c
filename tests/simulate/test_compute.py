"""How long a worker computes for a step."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.simulate.compute import Compute, Straggler


def test_a_step_takes_its_time() -> None:
    """Text or seconds; the default is 50 ms without jitter on every worker."""
    assert Compute().seconds(3, 100, seed=5) == 0.05
    assert Compute("2ms").seconds(0, 0, seed=0) == Compute(0.002).seconds(0, 0, seed=0) == 0.002
    assert Compute("2ms") == Compute(0.002)
    assert hash(Compute("2ms")) == hash(Compute(0.002))


def test_slow_workers_take_longer() -> None:
    """A slowdown lasts for the whole run; a factor below 1 is a faster worker."""
    compute = Compute(0.1, slowdown={1: 2, 2: 0.5})
    assert [compute.seconds(rank, 9, seed=0) for rank in range(4)] == [0.1, 0.2, 0.05, 0.1]


def test_stragglers_are_slow_for_a_while() -> None:
    """Only their rank and steps; the factors of overlapping stragglers and slowdowns multiply."""
    compute = Compute(
        1.0, stragglers=[Straggler(0, 2, 3, 10.0), Straggler(0, 4, 2, 3.0)], slowdown={0: 2.0}
    )
    assert [compute.seconds(0, s, seed=0) for s in range(7)] == [2, 2, 20, 20, 60, 6, 2]
    assert {compute.seconds(1, s, seed=0) for s in range(7)} == {1}


def test_a_trace_is_used_cyclically() -> None:
    """It replaces the step; slowdowns apply to it. Ranks without a trace use the step."""
    compute = Compute(trace=np.array([0.1, 0.2, 0.3]), slowdown={1: 2.0})
    assert [compute.seconds(0, s, seed=0) for s in range(5)] == [0.1, 0.2, 0.3, 0.1, 0.2]
    assert compute.seconds(1, 4, seed=0) == 0.4
    compute = Compute(1.0, trace={0: [0.1, 0.2], 2: (0.5,)})
    assert [compute.seconds(rank, 7, seed=0) for rank in range(3)] == [0.2, 1.0, 0.5]


@pytest.mark.parametrize("jitter", [0.05, 0.5])
def test_jitter_is_log_normal(jitter: float) -> None:
    """Mean −σ²/2 and deviation σ of the logarithm, σ² = ln(1 + c²); unrelated over the ranks.

    So the mean of a step is 1, and its deviation is c.
    """
    compute = Compute(1.0, jitter=jitter)
    logs = np.log([[compute.seconds(rank, step, 1) for step in range(3000)] for rank in (0, 1)])
    sigma = math.sqrt(math.log(1 + jitter**2))
    assert logs.mean() == pytest.approx(-(sigma**2) / 2, abs=5 * sigma / math.sqrt(logs.size))
    assert logs.std() == pytest.approx(sigma, rel=0.05)
    assert abs(np.corrcoef(logs)[0, 1]) < 0.1


@settings(deadline=None, max_examples=30, derandomize=True, database=None)
@given(
    rank=st.integers(0, 1000),
    step=st.integers(0, 10**9),
    seed=st.integers(0, 2**63 - 1),
    c=st.floats(0, 2),
)
def test_seconds_are_a_pure_function(rank: int, step: int, seed: int, c: float) -> None:
    """Independent of earlier calls and of the object."""
    first = Compute(jitter=c).seconds(rank, step, seed)
    other = Compute(jitter=c)
    other.seconds(rank + 1, step, seed)
    assert other.seconds(rank, step, seed) == first
    assert 0 < first < math.inf


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Compute("50"), ValueError, "like 100us, 50ms"),
        (lambda: Compute(0), ValueError, "finite and positive"),
        (lambda: Compute(jitter=-0.1), ValueError, "jitter must be finite and at least 0"),
        (lambda: Compute(jitter="10%"), TypeError, "jitter must be a number"),
        (lambda: Compute(slowdown={0: 0.0}), ValueError, r"slowdown\[0\] must be positive and"),
        (lambda: Compute(slowdown={-1: 2.0}), ValueError, "a rank in slowdown"),
        (lambda: Compute(slowdown={"0": 2.0}), TypeError, "a rank in slowdown"),
        (lambda: Compute(stragglers=[(0, 1, 2, 3.0)]), TypeError, r"Straggler\(rank, first_step"),
        (lambda: Compute(trace=[]), ValueError, "trace must hold at least one step"),
        (lambda: Compute(trace={}), ValueError, "trace must hold at least one rank"),
        (lambda: Compute(trace={-1: [1.0]}), ValueError, "a rank in trace"),
        (lambda: Compute(trace=[0.1, -1.0]), ValueError, "-1.0 is not a duration"),
        (lambda: Compute(trace="50ms"), TypeError, "trace must be a sequence"),
        (lambda: Straggler(-1, 0, 1, 2.0), ValueError, "rank must be at least 0"),
        (lambda: Straggler(0, -1, 1, 2.0), ValueError, "first_step must be at least 0"),
        (lambda: Straggler(0, 0, 0, 2.0), ValueError, "steps must be at least 1"),
        (lambda: Straggler(0, 0, 1, 0.0), ValueError, "factor must be positive and finite"),
        (lambda: Compute().seconds(-1, 0, 0), ValueError, "rank must be at least 0"),
        (lambda: Compute().seconds(0, -1, 0), ValueError, "step must be at least 0"),
        (lambda: Compute().seconds(0, 0, -1), ValueError, "seed must be at least 0"),
    ],
)
def test_impossible_computes_are_refused(
    make: Callable[[], object], error: type[Exception], message: str
) -> None:
    """The error names the argument and what is allowed."""
    with pytest.raises(error, match=message):
        make()
