"""Times to the ideal's metric, against numbers found by hand."""

import pytest
from benchmarks.lateness import best_so_far, lateness, metric_at, seconds_to, summary, table

IDEAL = [(10.0, 0.2), (20.0, 0.4), (30.0, 0.35), (40.0, 0.5)]
LATE = [(12.0, 0.1), (24.0, 0.3), (36.0, 0.45)]


def test_curves_are_the_best_so_far_and_straight_between() -> None:
    corners = best_so_far(IDEAL, less=False)
    assert [metric for _, metric in corners] == [0.2, 0.4, 0.4, 0.5]
    assert metric_at(corners, 15) == pytest.approx(0.3)
    assert metric_at(corners, 35) == pytest.approx(0.45)
    assert metric_at(corners, 5) is metric_at(corners, 41) is None
    assert seconds_to(corners, 0.4) == 20
    assert seconds_to(corners, 0.1) == 10
    assert seconds_to(corners, 0.51) is None


def test_lateness_is_a_ratio_of_times_to_one_metric() -> None:
    assert lateness(LATE, IDEAL, 15, less=False) == pytest.approx(24 / 15)
    assert lateness(LATE, IDEAL, 20, less=False) == pytest.approx(32 / 20)
    assert lateness(LATE, IDEAL, 40, less=False) is None
    mirrored = [[(s, 1 - m) for s, m in one] for one in (LATE, IDEAL)]
    assert lateness(*mirrored, 20, less=True) == pytest.approx(32 / 20)
    with pytest.raises(ValueError, match="no metric after 50 s"):
        lateness(LATE, IDEAL, 50, less=False)


def test_seeds_are_paired_and_those_that_never_arrive_are_counted() -> None:
    better = [(s, m + 0.2) for s, m in LATE]
    rows = table({"x": {0: LATE, 1: better}}, {0: IDEAL, 1: IDEAL}, [20, 40], less=False)
    # 0: 1.6 and never; 1: at .4 after 18 s, at .5 after 24
    assert rows == [["x", "1.25 (0.90–1.60)", "0.60, 1 of 2"]]
    assert summary([None, None]) == "never"
    assert summary([1.0, 2.0, 3.0]) == "2.00 ± 2.48"  # 4.302653 · 1 / √3
