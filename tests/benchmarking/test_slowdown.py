"""Times to the ideal's metric, against numbers found by hand."""

import math

import pytest
from benchmarks.race.slowdown import (
    best_so_far,
    median,
    metric_at,
    seconds_to,
    slowdown_half_way,
    slowdown_to_share,
    summary,
)

from benchmarking.race_results import result

IDEAL = [(10.0, 0.2), (20.0, 0.4), (30.0, 0.35), (40.0, 0.5)]
LATE = [(12.0, 0.1), (24.0, 0.3), (36.0, 0.45), (48.0, 0.47)]


def test_curves_are_the_best_so_far_and_straight_between() -> None:
    corners = best_so_far(result("ideal", IDEAL))
    assert [metric for _, metric in corners] == [0.2, 0.4, 0.4, 0.5]
    assert metric_at(corners, 15) == pytest.approx(0.3)
    assert metric_at(corners, 35) == pytest.approx(0.45)
    assert seconds_to(corners, 0.4) == 20
    assert seconds_to(corners, 0.1) == 10
    assert seconds_to(corners, 0.51) is None
    for outside in (5, 41):
        with pytest.raises(ValueError, match=f"no metric after {outside} s"):
            metric_at(corners, outside)


@pytest.mark.parametrize("higher", [True, False])
def test_the_slowdown_is_a_ratio_of_times_to_one_metric(higher: bool) -> None:
    """Half-way, at 20 s, the ideal has 0.4; 98 % of its improvement are 0.2 + 0.98 · 0.3."""
    late, ideal, better = (
        result("bsp", [(s, m if higher else 1 - m) for s, m in points], higher=higher)
        for points in (LATE, IDEAL, [*LATE, (60.0, 0.498)])
    )
    assert slowdown_half_way(late, ideal) == pytest.approx(32 / 20)
    assert slowdown_to_share(late, ideal, 0.98) is None
    arrived = 48 + 12 * (0.494 - 0.47) / (0.498 - 0.47)
    reached = 30 + 10 * (0.494 - 0.4) / (0.5 - 0.4)
    assert slowdown_to_share(better, ideal, 0.98) == pytest.approx(arrived / reached)
    assert slowdown_to_share(ideal, ideal, 0.98) == 1


def test_runs_that_never_arrive_are_counted() -> None:
    assert summary([1.6, 0.9]) == "1.25 (0.90 and 1.60)"
    assert summary([None, 0.6, 0.8]) == "2 of 3, 0.60 at best"
    assert summary([None, None]) == "never"
    assert summary([1.0, 2.0, 3.0]) == "2.00 [1.00, 3.00]"
    assert median([None, 0.6, 0.8]) == 0.8
    assert median([None, 0.6]) == math.inf
