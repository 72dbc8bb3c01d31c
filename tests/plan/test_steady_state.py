"""When a run counts as steady: on series that are made up."""

from collections.abc import Callable, Iterable, Iterator
from itertools import cycle, islice
from typing import Any

import numpy as np
import pytest

from offbeat.plan.record import Step
from offbeat.plan.steady_state import SteadyStateDetector, Window


class Series:
    """A record of steps of (seconds, bytes, backlog, syncs)."""

    def __init__(self, steps: Iterable[tuple[float, float, float, int]]) -> None:
        self.step_seconds = 1.0
        self.steps: list[Step] = []
        self._coming: Iterator[tuple[float, float, float, int]] = iter(steps)

    def __len__(self) -> int:
        return len(self.steps)

    def more(self) -> bool:
        one = next(self._coming, None)
        if one is None:
            return False
        before = self.steps[-1] if self.steps else Step(0, 0, 0, 0, 0, 0)
        seconds, payload, backlog, syncs = one
        self.steps.append(
            Step(
                before.clock + seconds,
                before.computed + 1.0,
                before.payload + payload,
                before.busy,
                backlog,
                before.syncs + syncs,
            )
        )
        return True


def watch(steps: Iterable[tuple[float, float, float, int]], **changes: Any) -> Window | None:
    """The window that is found; None if the series ends before."""
    series: Any = Series(steps)
    watching = SteadyStateDetector(**{"jitter": False, "alone": False, **changes})
    while series.more():
        if watching.ended(series):
            return watching.window
    return None


def rate(steps: Callable[[], Iterable[tuple[float, float, float, int]]], window: Window) -> float:
    """Seconds of a step in the window."""
    seconds = [one[0] for one in islice(steps(), window.last)]
    return sum(seconds[window.first :]) / (window.last - window.first)


LOCAL, MEAN = (1.0, 0.0, 0.0, 0), (4.0, 100.0, 0.0, 1)


def intervals(*lengths: int) -> Iterable[tuple[float, float, float, int]]:
    """A mean after so many steps, and so on, in turn."""
    for length in cycle(lengths):
        yield from [LOCAL] * (length - 1)
        yield MEAN


def test_equal_steps_are_steady_soon() -> None:
    window = watch(cycle([MEAN]))
    assert window is not None
    assert window.steady
    assert window.last <= 30


def test_whole_periods_are_taken() -> None:
    window = watch(intervals(8))
    assert window is not None
    assert rate(lambda: intervals(8), window) == pytest.approx(1 + 3 / 8)
    assert (window.last - window.first) % 8 == 0


def test_nothing_is_steady_before_a_mean() -> None:
    """Steps are alike until the first mean; more than two periods are required."""
    window = watch(intervals(1000))
    assert window is not None
    assert window.last >= 2000
    assert rate(lambda: intervals(1000), window) == pytest.approx(1.003)
    assert watch(islice(cycle([LOCAL]), 3000)) is None


def test_a_strategy_that_never_averages_is_steady_at_last() -> None:
    """It sends flags in each step and never takes a mean."""
    flags = (1.1, 56.0, 0.0, 0)
    window = watch(cycle([flags]))
    assert window is not None
    assert window.steady


@pytest.mark.parametrize("lengths", [(14, 14, 14, 15), (12, 13), (33, 33, 34), (5, 5, 5, 5, 6)])
def test_nearly_equal_intervals_are_no_period(lengths: tuple[int, ...]) -> None:
    """The fragments of DiLoCo have such intervals."""
    window = watch(intervals(*lengths))
    assert window is not None
    expected = 1 + 3 * len(lengths) / sum(lengths)
    assert rate(lambda: intervals(*lengths), window) == pytest.approx(expected, rel=0.002)


def growing(queue: float) -> Iterable[tuple[float, float, float, int]]:
    """A link with a little more to do than it can; from a backlog of 20 on all wait."""
    backlog = 0.0
    while True:
        backlog = min(20.0, backlog + queue)
        yield (1.0 + queue if backlog == 20 else 1.0, 10.0, backlog, 1)


def test_a_queue_that_grows_slowly_is_not_steady() -> None:
    """Only the backlog differs between steps until it is full."""
    window = watch(growing(0.05))
    assert window is not None
    assert window.first >= 20 / 0.05 - 1
    assert rate(lambda: growing(0.05), window) == pytest.approx(1.05)


def test_a_run_without_enough_time_is_not_steady() -> None:
    """Figures are then taken from the steps so far."""
    seconds = iter(range(10**6))
    window = watch(growing(0.05), now=lambda: next(seconds), most_seconds=50)
    assert window is not None
    assert not window.steady
    assert 0 < window.first < window.last


@pytest.mark.parametrize("alone", [False, True])
def test_a_first_step_that_takes_too_long_is_not_the_last(alone: bool) -> None:
    """Figures need a step and the one before it."""
    seconds = iter(range(10**6))
    window = watch(growing(0.05), now=lambda: next(seconds), most_seconds=0.5, alone=alone)
    assert window is not None
    assert (window.first, window.last) == (1, 2)


def noisy(spread: float, queue: float = 0.0) -> Iterable[tuple[float, float, float, int]]:
    random, backlog = np.random.default_rng(1), 0.0
    while True:
        backlog += queue
        yield (1.5 + spread * random.standard_normal(), 10.0, backlog, 1)


def test_jitter_takes_as_many_steps_as_it_needs() -> None:
    """± 1 % of 1.5 s with a spread of s needs about (2·s/0.015)² steps."""
    calm, wild = (watch(noisy(spread), jitter=True) for spread in (0.02, 0.4))
    assert calm is not None
    assert wild is not None
    assert calm.steady
    assert wild.steady
    assert calm.last < 300 < 1500 < wild.last < 8000
    assert rate(lambda: noisy(0.4), wild) == pytest.approx(1.5, rel=0.012)


def test_jitter_and_a_growing_queue_are_not_steady() -> None:
    assert watch(islice(noisy(0.02, queue=0.01), 2000), jitter=True) is None


def test_batches_of_the_length_of_a_period_do_not_deceive() -> None:
    """Every fourth mean is smaller: 25 steps nearly repeat, 100 repeat exactly."""

    def steps() -> Iterable[tuple[float, float, float, int]]:
        for size in cycle([100.0, 100.0, 100.0, 60.0]):
            yield from [LOCAL] * 24
            yield (1.0 + size / 25, size, 0.0, 1)

    window = watch(steps())
    assert window is not None
    assert (window.last - window.first) % 100 == 0


def test_rounding_of_bytes_is_no_difference() -> None:
    """The equal parts of the workers of a node differ by a byte."""
    window = watch((1.0, 100.0 + i % 3, 0.0, 1) for i in range(100))
    assert window is not None
    assert window.last <= 30
