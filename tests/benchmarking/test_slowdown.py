"""Times to the ideal's metric, against numbers found by hand."""

import math

import pytest
from benchmarks.race.slowdown import median, slowdown_half_way, slowdown_to_share, summary

from benchmarking.race_results import result

IDEAL = [(10.0, 0.2), (20.0, 0.4), (30.0, 0.35), (40.0, 0.5)]
LATE = [(12.0, 0.1), (24.0, 0.3), (36.0, 0.45), (48.0, 0.47)]


def test_times_are_on_straight_lines_between_the_best_so_far() -> None:
    run = result("ideal", IDEAL)
    assert [metric for _, metric in run.best_so_far()] == [0.2, 0.4, 0.4, 0.5]
    assert [run.seconds_to(one) for one in (0.1, 0.2, 0.3, 0.4)] == [10, 10, 15, 20]
    assert run.seconds_to(0.45) == pytest.approx(35)
    assert run.seconds_to(0.51) is None
    lost = result("bsp", [(10.0, math.nan), (20.0, 0.4), (30.0, math.nan), (40.0, 0.6)])
    assert lost.seconds_to(0.3) == 20
    assert lost.seconds_to(0.5) == pytest.approx(35)
    loss = result("bsp", [(10.0, 3.0), (20.0, 2.0), (30.0, 2.5)], higher=False)
    assert [loss.seconds_to(one) for one in (3.0, 2.25, 2.0, 1.9)] == [10, 17.5, 20, None]
    assert loss.gained(0.5) == pytest.approx(2.75)
    with pytest.raises(ValueError, match="no metric after 5 s"):
        slowdown_half_way(run, result("ideal", [(8.0, 0.1), (10.0, 0.2)]))


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
    assert summary([1.0, 2.0, 3.0]) == "2.00 [-0.48, 4.48]"
    assert median([None, 0.6, 0.8]) == 0.8
    assert median([None, 0.6]) == math.inf
