"""Times to the ideal's metric, against numbers found by hand."""

import pytest
from benchmarks.race.curves import slowdowns
from benchmarks.race.slowdown import best_so_far, metric_at, seconds_to, slowdown, summary

IDEAL = [(10.0, 0.2), (20.0, 0.4), (30.0, 0.35), (40.0, 0.5)]
LATE = [(12.0, 0.1), (24.0, 0.3), (36.0, 0.45)]


def test_curves_are_the_best_so_far_and_straight_between() -> None:
    corners = best_so_far(IDEAL, lower_is_better=False)
    assert [metric for _, metric in corners] == [0.2, 0.4, 0.4, 0.5]
    assert metric_at(corners, 15) == pytest.approx(0.3)
    assert metric_at(corners, 35) == pytest.approx(0.45)
    assert metric_at(corners, 5) is metric_at(corners, 41) is None
    assert seconds_to(corners, 0.4) == 20
    assert seconds_to(corners, 0.1) == 10
    assert seconds_to(corners, 0.51) is None


def test_the_slowdown_is_a_ratio_of_times_to_one_metric() -> None:
    assert slowdown(LATE, IDEAL, 15, lower_is_better=False) == pytest.approx(24 / 15)
    assert slowdown(LATE, IDEAL, 20, lower_is_better=False) == pytest.approx(32 / 20)
    assert slowdown(LATE, IDEAL, 40, lower_is_better=False) is None
    mirrored = [[(s, 1 - m) for s, m in one] for one in (LATE, IDEAL)]
    assert slowdown(*mirrored, 20, lower_is_better=True) == pytest.approx(32 / 20)
    with pytest.raises(ValueError, match="no metric after 50 s"):
        slowdown(LATE, IDEAL, 50, lower_is_better=False)


def test_seeds_are_paired_and_those_that_never_arrive_are_counted() -> None:
    better = [(s, m + 0.2) for s, m in LATE]
    runs = {"x": {0: LATE, 1: better}, "ideal": {0: IDEAL, 1: IDEAL}}
    # 0: 1.6 and never; 1: at .4 after 18 s, at .5 after 24
    assert summary(slowdowns(runs, "x", 20)) == "1.25 (0.90–1.60)"
    assert summary(slowdowns(runs, "x", 40)) == "0.60, 1 of 2"
    assert summary([None, None]) == "never"
    assert summary([1.0, 2.0, 3.0]) == "2.00 [1.00, 3.00]"
