"""The page about the comparisons quotes their results."""

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.harness import RESULTS, ROOT
from benchmarks.race import evidence, studies, tables
from benchmarks.race.studies import Cell

from benchmarking.race_results import result

CELL = Cell("headline", "cnn", "10Mbit/s")
METHODS = ("ideal", "streaming", tables.DDP)
CURVE = [(1.0, 0.1), (2.0, 0.2), (4.0, 0.4)]
FASTER, SLOWER = 0.05, -0.02
"""What is added to the metric of the curve."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory with one cell, of two methods and three seeds."""
    monkeypatch.setattr(studies, "HEADLINE", METHODS)
    monkeypatch.setattr(Cell, "seeds", 3)
    write(tmp_path)
    return tmp_path


def write(folder: Path) -> None:
    """Write a cell: the ideal is better with twice the rate, streaming takes twice the time."""
    lines = []
    for seed in (9, 0, 1, 2):
        trial = {"ideal": "ideal", "streaming": "streaming"} if seed == 9 else {}
        for method, more in (("ideal", 0.0), ("ideal --lr-scale 2", FASTER)):
            points = [(s, m + more) for s, m in CURVE]
            lines.append(result(method, points, seed=seed, trial=trial.get("ideal")))
        points = [(2 * s, m + FASTER + 0.01 * seed) for s, m in CURVE]
        lines.append(result("streaming", points, seed=seed, trial=trial.get("streaming")))
        points = [(3 * s, m + FASTER) for s, m in CURVE]
        trial_of = tables.DDP if seed == 9 else None
        lines.append(result("bsp", points, seed=seed, trial=trial_of))
    CELL.path(folder).write_text("".join(json.dumps(one.to_dict()) + "\n" for one in lines))


def test_methods_are_compared_with_the_ideal_at_its_best(folder: Path) -> None:
    """With twice the rate it ends at 45 %. Streaming has the same, and 1 or 2 points more."""
    *_, ideal, streaming, _ = tables.tuned("headline", "cnn", folder).splitlines()
    assert ideal == (
        "| 10Mbit/s | ideal | `ideal --lr-scale 2` | 1.00 [1.00, 1.00] | 1.00 [1.00, 1.00] "
        "| 1.00 [1.00, 1.00] | 45.0 % |  |"
    )
    # Half-way is 25 % after 2 s, 90 % are 42 % after 3.7 s, 98 % are 44.4 % after 3.94 s. A point
    # is 0.2 s.
    half = [(4 - 0.2 * seed) / 2 for seed in (0, 1, 2)]
    most, nearly_all = ([2 * (s - 0.1 * seed) / s for seed in (0, 1, 2)] for s in (3.7, 3.94))
    for name, values in (("half-way", half), ("90 %", most), ("98 %", nearly_all)):
        mean = f"{sum(values) / 3:.2f} [{values[2]:.2f}, {values[0]:.2f}]"
        assert mean in streaming, name
    assert streaming.endswith("| 46.0 % | +1.0 [+0.0, +2.0] |")


def test_first_settings_are_compared_with_the_ideal_at_the_same_rate(folder: Path) -> None:
    *_, ideal, streaming, _ = tables.first_settings("cnn", folder).splitlines()
    assert ideal.endswith("| 40.0 % |  |")
    assert streaming.endswith("| 46.0 % | +6.0 [+5.0, +7.0] |")


def test_an_unfinished_cell_is_left_out(folder: Path) -> None:
    path = CELL.path(folder)
    assert tables.cells_of("headline", "cnn", folder) == [CELL]
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    assert tables.cells_of("headline", "cnn", folder) == []
    assert evidence.sections(folder) == {}


def test_a_method_that_never_arrives_says_so() -> None:
    ideal = {seed: result("ideal", CURVE, seed=seed) for seed in range(3)}
    late = {seed: result("bsp", [(s, m + SLOWER) for s, m in CURVE], seed=seed) for seed in ideal}
    assert tables.slowdowns(late, ideal) == [None] * 3
    late[0] = ideal[0]
    assert tables.slowdowns(late, ideal) == [1.0, None, None]


def write_ends(cell: Cell, folder: Path, ends: dict[str, float]) -> None:
    """Write runs of three seeds. The metric ends at the given value plus 1 % of the seed."""
    lines = [
        result(method, [(1.0, 0.1), (2.0, final + 0.01 * seed)], seed=seed).to_dict()
        for method, final in ends.items()
        for seed in range(3)
    ]
    cell.path(folder).write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_learning_rates_are_compared_with_the_ideal_at_its_best_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (studies, tables):
        monkeypatch.setattr(module, "RATES", {("cnn", 16): (0.5, 1)})
        monkeypatch.setattr(module, "VARIANTS", {"cnn": ("ideal", "streaming")})
    ends = {
        **{"ideal --lr-scale 0.5": 0.50, "ideal": 0.40},
        **{"streaming --lr-scale 0.5": 0.45, "streaming": 0.52},
    }
    cell = Cell("rates", "cnn", "50Mbit/s", workers=16)
    monkeypatch.setattr(tables, "CELLS", (cell,))
    write_ends(cell, tmp_path, ends)
    assert tables.rates("cnn", tmp_path).splitlines() == [
        "| workers | method | × 0.5 | × 1 |",
        "|---|---|---|---|",
        "| 16 | `ideal` | 51.0 % | -10.0 [-10.0, -10.0] |",
        "| 16 | `streaming` | -5.0 [-5.0, -5.0] | +2.0 [+2.0, +2.0] |",
    ]


def test_many_workers_are_compared_with_the_best_ideal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runs have two steps of 1 s. The mean over the seeds is 1 point above the given value."""
    monkeypatch.setattr(Cell, "seeds", 3)
    cell = Cell("many", "mnist", "50Mbit/s", workers=64, workers_per_node=8)
    monkeypatch.setattr(tables, "CELLS", (cell,))
    ideals = {f"ideal --lr-scale {rate}": 0.4 + 0.001 * rate for rate in (4, 8, 32)}
    ends = {**ideals, "ideal --lr-scale 16": 0.5, "streaming --lr-scale 8": 0.48}
    write_ends(cell, tmp_path, ends)
    ideal, streaming = tables.many(tmp_path).splitlines()[2:]
    assert ideal.startswith(
        "| 64 in 8 nodes | 50Mbit/s | `ideal --lr-scale 16` | 1000.0 ms | 1.0 |"
    )
    assert ideal.endswith("| 51.0 % |  |")
    assert streaming.endswith("| 49.0 % | -2.0 [-2.0, -2.0] |")


def test_slower_links_are_sorted_by_bandwidth(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over 20 Mbit/s the model of 1 MB takes 0.4 s, which is 8 steps of 50 ms."""
    slower = Cell("slower", "cnn", "20Mbit/s")
    monkeypatch.setattr(tables, "CELLS", (CELL, slower))
    write_ends(slower, folder, {"ideal": 0.5, "streaming": 0.48})
    fast, slow = tables.slower(folder).splitlines()[2:]
    assert fast.startswith("| CNN, SGD | 20Mbit/s | 8.0 steps |")
    assert fast.endswith("| 49.0 % | -2.0 [-2.0, -2.0] |")
    assert slow.startswith("| CNN, SGD | 10Mbit/s | 16.0 steps |")


def test_training_features_have_a_row_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = Cell("features", "clipping", "50Mbit/s")
    monkeypatch.setattr(tables, "CELLS", (cell,))
    write_ends(cell, tmp_path, {"ideal": 0.5, "streaming": 0.53})
    (row,) = tables.features(tmp_path).splitlines()[2:]
    assert row.startswith("| clipping | 51.0 % | 0.9")
    assert row.endswith("| +3.0 [+3.0, +3.0] |")


def test_unequal_speeds_have_two_columns_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default settings of streaming end at 43 %, those that were chosen at 53 %."""
    methods = ("ideal", "streaming")
    for module in (studies, tables):
        monkeypatch.setattr(module, "UNEVEN", methods)
    monkeypatch.setattr(Cell, "seeds", 1)
    cell = Cell("uneven", "mlp", "50Mbit/s", speeds="graded")
    monkeypatch.setattr(tables, "CELLS", (cell,))
    lines = [
        result(method, [(1.0, 0.1), (2.0, final)], seed=seed, trial=trial if seed else None)
        for seed in (9, 0)
        for method, trial, final in (
            *(("ideal", "ideal", 0.5), ("streaming", "streaming", 0.43)),
            ("streaming --lr-scale 2", "streaming", 0.53),
        )
    ]
    cell.path(tmp_path).write_text("".join(json.dumps(one.to_dict()) + "\n" for one in lines))
    assert evidence.sections(tmp_path)["Uneven machines"].splitlines() == [
        "| method | 1, 0.8, 0.5, 0.25: 90 % | 1, 0.8, 0.5, 0.25: end − ideal |",
        "|---|---|---|",
        "| streaming, default settings | never | -7.0 |",
        "| ideal | 1.00 | 50.0 % |",
        "| streaming | 0.97 | +3.0 |",
    ]


def test_expectations_are_those_of_the_first_settings(folder: Path) -> None:
    """DDP, the only other method, takes three times the ideal's time and ends level with it."""
    (row,) = tables.expectations(folder).splitlines()[2:]
    # The default settings, which are also the tuned ones here, against the ideal at its best.
    streaming = tables.tuned("headline", "cnn", folder).splitlines()[3].strip("| ").split(" | ")
    assert row.startswith(f"| CNN, SGD | 4 | 10Mbit/s | {streaming[4]} | {streaming[7]} |")
    three, level = "3.00 [3.00, 3.00]", "+0.0 [+0.0, +0.0]"
    assert row.endswith(f" | DDP | {three} | {level} | {three} |")


def test_expectations_of_many_workers_are_those_at_the_ideals_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Cell, "seeds", 3)
    cell = Cell("many", "transformer", "50Mbit/s", workers=16)
    monkeypatch.setattr(tables, "CELLS", (cell,))
    write_ends(
        cell,
        tmp_path,
        {"ideal --lr-scale 2": 0.5, "streaming": 0.45, "streaming --lr-scale 2": 0.48},
    )
    (row,) = tables.expectations(tmp_path).splitlines()[2:]
    assert row.startswith("| Transformer, AdamW | 16 | 50Mbit/s | ")
    assert row.endswith(" | -2.0 [-2.0, -2.0] | | | | |")


def test_a_section_without_a_table_is_refused(folder: Path) -> None:
    sections = evidence.sections(folder)
    with pytest.raises(ValueError, match="no section 'What to expect'"):
        evidence.page("# Evidence\n", sections)
    with pytest.raises(ValueError, match="section 'What to expect' of the page has no table"):
        evidence.page("\n## What to expect\n\nText.\n\n## Next\n\n| a |\n", sections)


@pytest.mark.pages
def test_the_page_matches_the_results() -> None:
    """``python -m benchmarks evidence`` writes it."""
    text = evidence.PAGE.read_text(encoding="utf-8")
    assert evidence.page(text, evidence.sections()) == text


@pytest.mark.pages
def test_wrong_numbers_in_the_page_are_corrected() -> None:
    """All tables are replaced, so the comparison above can fail."""
    text = wrong = evidence.PAGE.read_text(encoding="utf-8")
    sections = evidence.sections()
    for old in sections.values():
        assert old in wrong
        wrong = wrong.replace(old, old.replace("1", "7"))
        assert old not in wrong
    assert evidence.page(wrong, sections) == text


def test_the_table_of_the_readme_is_that_of_its_results() -> None:
    """Medians of the three seeds with their range, of the lines of the file themselves."""
    lines = (RESULTS / "readme-digits.jsonl").read_text(encoding="utf-8").splitlines()
    runs: dict[str, list[dict[str, Any]]] = {}
    for one in map(json.loads, lines):
        runs.setdefault(one["strategy"], []).append(one)
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(runs) == 6
    for strategy, of in runs.items():
        (line,) = (one for one in page.splitlines() if one.startswith(f"| `{strategy}`"))
        shown = []
        for name, form in (("time_to_target_seconds", ".1f"), ("final", ".4f")):
            low, middle, high = (format(one, form) for one in sorted(run[name] for run in of))
            shown.append(f"{middle} ({low}-{high}){'' if name == 'final' else ' s'}")
        shown.append(f"{sorted(100 * run['idle'] for run in of)[1]:.0f} %")
        assert [cell.strip() for cell in line.split("|")[2:-1]] == shown
