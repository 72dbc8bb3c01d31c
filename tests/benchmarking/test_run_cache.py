"""The file of cached runs, and the times to a target."""

from dataclasses import dataclass
from pathlib import Path

import pytest
from benchmarks.run_cache import RunCache, arrival


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


def test_the_time_to_a_target_is_that_of_the_first_evaluation_at_it():
    points = [{"seconds": 1.0, "metric": 0.5}, {"seconds": 2.0, "metric": 0.9}]
    assert arrival(points, 0.9) == 2.0
    assert arrival(points, 0.95) is None
