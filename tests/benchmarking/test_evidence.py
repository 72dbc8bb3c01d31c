"""The pages about the race quote its results."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from benchmarks.harness import IMAGES, RESULTS
from benchmarks.race import evidence, simulated_results, simulated_tables
from benchmarks.race.simulated_results import against_best_rival
from benchmarks.race.simulated_settings import CORNERS, MAP

from benchmarking.test_race_simulated import as_read, rows_of


def test_times_are_compared_with_the_best_rival(tmp_path: Path) -> None:
    """Made up so that streaming is last in all cells: at the end after 31.1 s, tuned after 21.1.

    The best rivals are there after 11 s. The share is there after 0.94375 of the time past 1 s.
    """
    rows = as_read(rows_of("defaults", "tuned"), tmp_path)
    usual, tuned = ((1 + (end - 1) * 0.94375) / (1 + 10 * 0.94375) for end in (31.1, 21.1))
    for expected, tracks in ((usual, ["defaults"]), (tuned, ["tuned", "tuned"])):
        ratios = [ratio for ratio, _ in against_best_rival(rows, *tracks).values()]
        assert ratios == pytest.approx([expected] * 12)
    assert "never" not in simulated_tables.map_table(rows)


def test_corners_of_the_larger_model_have_a_table_of_their_own(tmp_path: Path) -> None:
    """Only those that were run, and only the CNN's."""
    rows = as_read(rows_of("defaults"), tmp_path)
    assert "A larger model" not in evidence.tables(tmp_path)
    corner, other = CORNERS[1], MAP[1]
    larger = [
        row | {"workload": "cnn", "points": [[1, 0.1], [2 if row["family"] == "ideal" else 8, 0.9]]}
        for row in rows
        if row["cell"] in (corner, other)
    ]
    written = [row | {"cell": asdict(row["cell"])} for row in (*rows, *larger)]
    as_read(written, tmp_path)
    first, _, ideal, *others = evidence.tables(tmp_path)["A larger model"].splitlines()
    assert first == "| method | 10Mbit/s, 0.1 ms |"
    assert ideal.startswith("| `ideal` | 1.9 s (100 %) |")
    assert "| `streaming` | 7.6 s (26 %) |" in others


def test_pictures_of_the_repository_are_small_and_copied() -> None:
    for path in IMAGES.glob("race-*.png"):
        assert path.stat().st_size < 100_000
        assert path.read_bytes() == (RESULTS / path.name).read_bytes()


@pytest.mark.pages
def test_the_page_matches_the_results() -> None:
    """``python -m benchmarks evidence`` writes it."""
    text = evidence.PAGE.read_text(encoding="utf-8")
    assert evidence.page(text) == text


@pytest.mark.pages
def test_no_tuned_rival_is_a_tenth_sooner() -> None:
    """The page claims this of the map, with streaming averaging as it comes."""
    found = simulated_results.against_best_rival(simulated_results.read(), "tuned")
    assert set(found) == set(MAP)
    assert max(times for times, _ in found.values()) <= 1.1
    assert (
        "at most 1.1 times the time of\nthe best rival that was tuned" in evidence.PAGE.read_text()
    )


@pytest.mark.pages
def test_wrong_numbers_in_the_page_are_corrected() -> None:
    """All tables are replaced, so the comparison above can fail."""
    text = wrong = evidence.PAGE.read_text(encoding="utf-8")
    for old in evidence.tables().values():
        assert old in wrong
        wrong = wrong.replace(old, old.replace("1", "7"))
        assert old not in wrong
    assert evidence.page(wrong) == text


def test_the_table_of_the_readme_is_that_of_its_results() -> None:
    """Medians of the three seeds with their range, of the lines of the file themselves."""
    lines = (RESULTS / "readme-digits.jsonl").read_text(encoding="utf-8").splitlines()
    runs: dict[str, list[dict[str, Any]]] = {}
    for one in map(json.loads, lines):
        runs.setdefault(one["strategy"], []).append(one)
    page = evidence.README.read_text(encoding="utf-8")
    assert len(runs) == 6
    for strategy, of in runs.items():
        (line,) = (one for one in page.splitlines() if one.startswith(f"| `{strategy}`"))
        shown = []
        for name, form in (("time_to_target_seconds", ".1f"), ("final", ".4f"), ("seconds", ".1f")):
            low, middle, high = (format(one, form) for one in sorted(run[name] for run in of))
            shown.append(f"{middle} ({low}-{high}){'' if name == 'final' else ' s'}")
        sent = sorted(run["payload_bytes"] / 1e6 for run in of)[1]
        idle = sorted(100 * run["idle"] for run in of)[1]
        cells = [cell.strip() for cell in line.split("|")[2:]]
        assert cells[:3] == shown
        assert cells[4:6] == [f"{sent:.1f} MB", f"{idle:.0f} %"]
