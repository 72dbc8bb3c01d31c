"""The grid of learning rates, and the file of runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from benchmarks.run_cache import RunCache, arrival, arrivals
from benchmarks.studies.tuning import GRID, tune


def finals_with(best: dict[str, float], noise: dict[int, float] | None = None) -> Any:
    """Metrics that fall with the distance from the best factor, and the runs asked for."""
    asked: list[tuple[str, float, int]] = []

    def final(runs: Sequence[tuple[str, float, int]]) -> list[float]:
        asked.extend(runs)
        return [
            -abs(GRID.index(scale) - GRID.index(best[name])) + (noise or {}).get(seed, 0.0) * scale
            for name, scale, seed in runs
        ]

    return final, asked


@pytest.mark.parametrize("best", [0.03, 0.3, 1.0, 3.0, 10.0])
def test_the_grid_is_widened_until_the_best_is_inside(best: float):
    final, asked = finals_with({"a": best})
    found = tune(["a"], final, seeds=[7])["a"]
    assert (found.scale, found.inside) == (best, True)
    place = GRID.index(best)
    assert {GRID[place - 1], GRID[place + 1]} <= found.scores.keys()
    assert len(asked) == len(set(asked))  # nothing twice


@pytest.mark.parametrize("best", [GRID[0], GRID[-1]])
def test_a_best_at_the_end_of_the_grid_is_marked(best: float):
    final, _ = finals_with({"a": best})
    found = tune(["a"], final, seeds=[7])["a"]
    assert (found.scale, found.inside) == (best, False)


def test_scores_are_means_over_the_tuning_seeds():
    """One seed alone would take the largest factor; the other one takes that back."""
    final, _ = finals_with({"a": 1.0}, {1: 100.0, 2: -100.0})
    assert tune(["a"], final, seeds=[1, 2])["a"].scale == 1.0
    assert tune(["a"], final, seeds=[1])["a"].scale == GRID[-1]


def test_of_equal_factors_the_one_nearest_to_1_is_taken():
    assert tune(["a"], lambda runs: [0.5] * len(runs), seeds=[0])["a"].scale == 1.0


@dataclass(frozen=True)
class Number:
    value: int


def square(cell: Number) -> dict[str, int]:
    return {"square": cell.value**2}


def test_a_cell_is_run_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A cell in the file is not run again; rows of other code do not count."""
    path = tmp_path / "kept.jsonl"
    cells = RunCache(square, path, processes=0)
    assert cells.rows([Number(2), Number(3), Number(2)]) == [
        {"square": 4},
        {"square": 9},
        {"square": 4},
    ]
    assert len(path.read_text().splitlines()) == 2

    again = RunCache(lambda cell: {"square": -1}, path, processes=0)
    assert again.rows([Number(3)]) == [{"square": 9}]

    monkeypatch.setattr("benchmarks.run_cache.fingerprint", lambda: "of other code")
    assert again.rows([Number(3)]) == [{"square": -1}]


def test_the_time_to_a_target_counts_the_runs_that_reach_it():
    points = [{"seconds": 1.0, "metric": 0.5}, {"seconds": 2.0, "metric": 0.9}]
    assert arrival(points, 0.9) == 2.0
    assert arrival(points, 0.95) is None
    rows = [{"points": points}, {"points": points[:1]}]
    assert arrivals(rows, 0.9) == "2.0 (2.0–2.0) s, 1 of 2"
    assert arrivals(rows, 0.5) == "1.0 (1.0–1.0) s"
    assert arrivals(rows, 0.99) == "never"
