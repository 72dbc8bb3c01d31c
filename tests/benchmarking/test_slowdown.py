"""Times to the ideal's metric, against numbers found by hand."""

import math

import pytest
from benchmarks.race.slowdown import (
    fastest,
    lateness,
    slowdown_half_way,
    slowdown_to_share,
    summary,
)

from benchmarking.race_results import result
from offbeat_lab.results import Result

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


def test_of_the_settings_that_ran_with_all_seeds_the_best_count() -> None:
    """In the trial the rate 4 is first, but it does not arrive with seed 1. Rate 2 always does."""

    def curve(label: str, seed: int, *points: tuple[float, float]) -> Result:
        method = "bsp" if label.startswith("bsp") else label.split()[0]
        return result(label, points, seed=seed, trial=method if seed == 9 else None)

    ends = {
        "ideal": {seed: (10.0, 0.5) for seed in (9, 0, 1)},
        "bsp": {seed: (40.0, 0.5) for seed in (9, 0, 1)},
        "bsp --lr-scale 2": {9: (30.0, 0.5), 0: (20.0, 0.5), 1: (30.0, 0.5)},
        "bsp --lr-scale 4": {9: (5.0, 0.5), 0: (5.0, 0.5), 1: (40.0, 0.4)},
        "bsp --lr-scale 8": {9: (1.0, 0.5), 0: (1.0, 0.5)},  # lacks a seed
    }
    runs = [
        curve(label, seed, (0.0, 0.0), end)
        for label, seeds in ends.items()
        for seed, end in seeds.items()
    ]
    found = fastest(runs, 0.9, 2)
    assert {method: of[0].label for method, of in found.items()} == {
        "ideal": "ideal",
        "bsp": "bsp --lr-scale 2",
    }
    assert lateness(found["bsp"], found["ideal"], 0.9) == (0, 2.5, -0.5)
    assert lateness({1: runs[11]}, found["ideal"], 0.9) == (1, math.inf, -0.4)
