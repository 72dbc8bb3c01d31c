"""The headline comparisons continue where they were stopped."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.race import headline
from benchmarks.race.settings import CELLS, TINY


def test_a_cell_is_one_command_with_all_methods() -> None:
    cell = next(one for one in CELLS if one.name == "lm-wan")
    words = headline.arguments(cell, Path("out"), Path("data"))
    assert words[:3] == ["compare", "stdlib-lm", "--simulate"]
    for pair in ("--bandwidth 50Mbit/s", "--tune 8", "--seeds 5", "--step-time 0.4s"):
        assert pair in " ".join(words)
    assert words.count("--strategy") == len(headline.METHODS)
    assert {one.name for one in headline.cells(["cifar"])} == {
        *("cifar-lan", "cifar-office", "cifar-wan", "cifar-dsl"),
    }


@pytest.mark.nightly
def test_an_interrupted_cell_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second command runs what the first one lacks: here nothing but the missing line."""
    monkeypatch.setattr(headline, "TRIALS", 3)
    monkeypatch.setattr(headline, "SEEDS", 1)
    monkeypatch.setattr(headline, "METHODS", ("ideal", "streaming"))
    words = [*headline.arguments(TINY, tmp_path), "--max-steps", "4"]
    command = [sys.executable, "-m", "offbeat.cli", *words]
    file = tmp_path / TINY.name / "results.jsonl"
    subprocess.run(command, check=True, timeout=100, env=os.environ)
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:-1]))
    subprocess.run(command, check=True, timeout=100, env=os.environ)
    assert len(file.read_text().splitlines()) == len(lines)
    assert file.read_text().startswith("".join(lines[:-1]))
