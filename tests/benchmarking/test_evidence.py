"""The page about the comparisons quotes their results."""

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.harness import RESULTS, ROOT
from benchmarks.race import evidence, studies, tables
from benchmarks.race.slowdown import slowdowns
from benchmarks.race.studies import Cell

from benchmarking.race_results import result
from offbeat_lab.results import Result

CELL = Cell("headline", "cnn", "10Mbit/s")
CELLS = (
    CELL,
    Cell("rates", "cnn", "50Mbit/s", workers=16),
    Cell("many", "mnist", "50Mbit/s", workers=64, workers_per_node=8),
    Cell("sweep", "cnn", "1Gbit/s"),
    Cell("sweep", "cnn", "20Mbit/s"),
    Cell("elsewhere", "cnn", "10Mbit/s", workers=16),
    Cell("fresh", "cnn", "10Mbit/s"),
    Cell("features", "clipping", "50Mbit/s"),
    Cell("skewed", "cnn", "50Mbit/s"),
    Cell("uneven", "mlp", "50Mbit/s", speeds="graded"),
)
ENDS = (
    {"ideal --lr-scale 0.5": 0.5, "ideal": 0.4}
    | {"streaming --lr-scale 0.5": 0.45, "streaming": 0.52},
    {f"ideal --lr-scale {rate}": 0.4 + 0.001 * rate for rate in (4, 8, 32)}
    | {"ideal --lr-scale 16": 0.5, "streaming --lr-scale 8": 0.48},
    {"ideal": 0.5, "streaming": 0.49},
    {"streaming": 0.48},
    {"ideal --lr-scale 2": 0.5, "ideal --lr-scale 4": 0.3, "bsp": 0.4, "bsp --lr-scale 2": 0.48}
    | {"streaming --lr-scale 2": 0.4, "streaming --lr-scale 4": 0.48},
    {"ideal --lr-scale 2": 0.5, "bsp": 0.49, "streaming --lr-scale 2": 0.53},
    {"ideal": 0.5, "streaming": 0.53},
    {"ideal": 0.5, "streaming": 0.48},
    {"ideal": 0.5, "streaming": 0.43, "streaming --lr-scale 2": 0.53},
)
"""The final metric of each method of the cells after the first one."""
CURVE = [(1.0, 0.1), (2.0, 0.2), (4.0, 0.4)]
FASTER, SLOWER = 0.05, -0.02
"""What is added to the metric of the curve."""


def write(cell: Cell, folder: Path, runs: list[Result]) -> None:
    cell.path(folder).write_text("".join(json.dumps(one.to_dict()) + "\n" for one in runs))


def headline() -> list[Result]:
    """The ideal is better with twice the rate, streaming takes twice the time, DDP three times."""
    runs = []
    for seed in (9, 0, 1, 2):  # the first one is that of the trials
        for method, label, slower, more in (
            ("ideal", "ideal", 1, 0.0),
            ("ideal", "ideal --lr-scale 2", 1, FASTER),
            ("streaming", "streaming --lr-scale 2", 2, FASTER + 0.01 * seed),
            (tables.DDP, "bsp", 3, FASTER),
        ):
            points = [(slower * s, m + more) for s, m in CURVE]
            runs.append(result(label, points, seed=seed, trial=method if seed == 9 else None))
    return runs


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory with results of three seeds. Most runs have two steps of 1 s."""
    monkeypatch.setattr(Cell, "seeds", 3)
    monkeypatch.setattr(tables, "CELLS", CELLS)
    monkeypatch.setattr(studies, "SKEWED", ("ideal", "streaming"))
    for module in (studies, tables):
        monkeypatch.setattr(module, "HEADLINE", ("ideal", "streaming", tables.DDP))
        monkeypatch.setattr(module, "FRESH", ("ideal", tables.DDP))
        monkeypatch.setattr(module, "RATES", {("cnn", 16): (0.5, 1)})
        monkeypatch.setattr(module, "VARIANTS", {("cnn", 16): ("ideal", "streaming")})
        monkeypatch.setattr(module, "UNEVEN", ("ideal", "streaming"))
    write(CELL, tmp_path, headline())
    for cell, ends in zip(CELLS[1:], ENDS, strict=True):
        tried = ("ideal", "streaming") if cell.study == "uneven" else ()
        first = 3 if cell.study == "fresh" else 0
        write(
            cell,
            tmp_path,
            [
                result(
                    method,
                    [(1.0, 0.1), (2.0, final + 0.01 * (seed % 9))],
                    seed=seed,
                    trial=method.partition(" ")[0] if seed == 9 else None,
                )
                for seed in ((9, 0, 1, 2) if tried else range(first, first + 3))
                for method, final in ends.items()
            ],
        )
    return tmp_path


# Of the headline, the ideal with twice the rate ends at 45 %: half-way is 25 % after 2 s, 90 % are
# 42 % after 3.7 s, 98 % are 44.4 % after 3.94 s. Streaming takes 2 · (s − 0.1 · seed) for that.
# Intervals are by Student's t. A star means that the budget ended before all neighbours were tried.
LATE = "1.00 [1.00, 1.00] | 1.02 [1.02, 1.03] | never | 49.0 % | -2.0 [-2.0, -2.0] |"
WORSE = "1.02 [1.02, 1.03]; -2.0 [-2.0, -2.0]"
SECTIONS = {
    "What to expect": (
        "| CNN, SGD, 10Mbit/s | default; DDP +1.05 [+0.92, +1.19] "
        "| 1.95 [1.81, 2.08] | +1.0 [-1.5, +3.5] | `bsp` "
        "| 3.00 [3.00, 3.00] | +0.0 [+0.0, +0.0] | 3.00 [3.00, 3.00] |",
    ),
    "CNN with SGD": (
        "| ideal | 45.0 % |",
        "| streaming | 1.95 [1.81, 2.08]; +1.0 [-1.5, +3.5] |",
        "| DDP | 3.00 [3.00, 3.00]; +0.0 [+0.0, +0.0] |",
    ),
    # Over 20 Mbit/s the model of 1 MB takes 0.4 s, which is 8 steps of 50 ms.
    "From fast to slow links": (
        "| CNN, SGD | 4 | 0.2 | 1.00 [1.00, 1.00] | 1.01 [1.01, 1.01] | never "
        "| 50.0 % | -1.0 [-1.0, -1.0] |",
        f"| CNN, SGD | 4 | 8.0 | {LATE}",
    ),
    "Sixteen workers and uneven links": (
        "| ideal | 51.0 % |",
        f"| streaming | {WORSE} |",
        f"| DDP | {WORSE} |",
        f"| streaming, default | {WORSE} |",
    ),
    "Seeds that were not used before": (  # with the other seeds
        "| CNN, SGD, 10Mbit/s | 1.46 [0.90, 2.02]; +2.0 [+0.7, +3.3] "
        "| +0.55 [-0.04, +1.13]; -2.5 [-4.3, -0.7] |",
    ),
    "Other trainings": ("| clipping | 51.0 % | 0.97 [0.97, 0.97] | +3.0 [+3.0, +3.0] |",),
    "Skewed labels": (
        "| `ideal` | 1.00 [1.00, 1.00] | 1.00 [1.00, 1.00] | 51.0 % |",
        "| `streaming` | 1.00 [1.00, 1.00] | 1.02 [1.02, 1.03] | -2.0 [-2.0, -2.0] |",
    ),
    "Uneven machines": (
        "| streaming, default settings | never | -7.0 [-7.0, -7.0] |",
        "| ideal | 1.00 [1.00, 1.00] | 51.0 % |",
        "| streaming | 0.97 [0.97, 0.97] | +3.0 [+3.0, +3.0] |",
    ),
}

HEADLINE = {
    "CNN with SGD": (
        "| 10Mbit/s | ideal | `ideal --lr-scale 2`* | 90 %, 98 % "
        "| 1.00 [1.00, 1.00] | 1.00 [1.00, 1.00] | 1.00 [1.00, 1.00] | 45.0 % |  |",
        "| 10Mbit/s | streaming | `streaming --lr-scale 2`* | 90 %, 98 % | 1.90 [1.65, 2.15] "
        "| 1.95 [1.81, 2.08] | 1.95 [1.82, 2.08] | 46.0 % | +1.0 [-1.5, +3.5] |",
        "| 10Mbit/s | DDP | `bsp`* | 90 %, 98 % | 3.00 [3.00, 3.00] "
        "| 3.00 [3.00, 3.00] | 3.00 [3.00, 3.00] | 45.0 % | +0.0 [+0.0, +0.0] |",
    ),
    "CNN with SGD, other learning rates": (
        "| 16 | `ideal` | 51.0 % | -10.0 [-10.0, -10.0] |",
        "| 16 | `streaming` | -5.0 [-5.0, -5.0] | +2.0 [+2.0, +2.0] |",
    ),
    "Seeds that were not used before": (
        "| ideal | 54.0 % |",
        "| streaming, default | 0.97 [0.97, 0.97]; +3.0 [+3.0, +3.0] |",
        "| DDP | 1.01 [1.01, 1.01]; -1.0 [-1.0, -1.0] |",
    ),
    "Many workers": (
        "| 64 in 8 nodes | 50Mbit/s | `ideal --lr-scale 16` "
        "| 1000.0 ms | 1.0 | 1.00 [1.00, 1.00] | 51.0 % |  |",
        "| 64 in 8 nodes | 50Mbit/s | `streaming --lr-scale 8` "
        "| 1000.0 ms | 1.0 | 1.02 [1.02, 1.03] | 49.0 % | -2.0 [-2.0, -2.0] |",
    ),
}


def test_the_sections_have_the_rows_of_the_results(folder: Path) -> None:
    """Methods are compared with the ideal at its best rate. Expectations are of the defaults."""
    found = evidence.sections(folder)
    long = evidence.headline(folder)
    rates, uneven = long["CNN with SGD, other learning rates"], found["Uneven machines"]
    assert rates.startswith("| workers | method | × 0.5 | × 1 |\n")
    assert uneven.startswith(
        "| method | 1, 0.8, 0.5, 0.25: 90 % | 1, 0.8, 0.5, 0.25: end − ideal |"
    )
    for tables_of, expected in ((found, SECTIONS), (long, HEADLINE)):
        rows = {name: tuple(text.splitlines()[2:]) for name, text in tables_of.items()}
        assert rows == expected


def test_an_unfinished_cell_is_left_out(folder: Path) -> None:
    write(CELL, folder, headline()[:-1])
    assert tables.cells_of("headline", "cnn", folder) == []
    assert {*SECTIONS} - {*evidence.sections(folder)} == {
        "What to expect",
        "CNN with SGD",
        "Seeds that were not used before",
        "Sixteen workers and uneven links",
    }


def test_a_cell_whose_best_trial_has_not_run_is_left_out(folder: Path) -> None:
    assert tables.cells_of("headline", "cnn", folder) == [CELL]
    better = [(0.9 * seconds, metric + FASTER) for seconds, metric in CURVE]
    trial = result("bsp --wire int4", better, seed=9, trial=tables.DDP)
    write(CELL, folder, [*headline(), trial])
    assert tables.cells_of("headline", "cnn", folder) == []


def test_a_method_that_never_arrives_says_so() -> None:
    ideal = {seed: result("ideal", CURVE, seed=seed) for seed in range(3)}
    late = {seed: result("bsp", [(s, m + SLOWER) for s, m in CURVE], seed=seed) for seed in ideal}
    assert slowdowns(late, ideal, 0.98) == [None] * 3
    late[0] = ideal[0]
    assert slowdowns(late, ideal, 0.98) == [1.0, None, None]


def test_a_method_that_does_not_always_arrive_has_no_difference_of_time() -> None:
    ideal = {seed: result("ideal", CURVE, seed=seed) for seed in range(3)}
    late = {seed: result("bsp", [(s, m - 0.1) for s, m in CURVE], seed=seed) for seed in ideal}
    late[0] = ideal[0]
    cases = ("default; 0 default and 2", ideal, late), ("DDP; 2 default and 0", late, ideal)
    for text, default, other in cases:
        found = tables._verdict(default, {tables.DDP: other}, tables.DDP, ideal)
        assert found == f"{text} DDP of 3 runs never arrive"


def test_a_section_without_a_table_is_refused(folder: Path) -> None:
    sections = evidence.sections(folder)
    with pytest.raises(ValueError, match="no section 'What to expect'"):
        evidence.page("# Evidence\n", sections)
    with pytest.raises(ValueError, match="section 'What to expect' of the page has no table"):
        evidence.page("\n## What to expect\n\nText.\n\n## Next\n\n| a |\n", sections)


@pytest.mark.pages
def test_the_pages_match_the_results() -> None:
    """``python -m benchmarks evidence`` writes them."""
    for path, found in (
        (evidence.PAGE, evidence.sections()),
        (evidence.HEADLINE, evidence.headline()),
    ):
        text = path.read_text(encoding="utf-8")
        assert evidence.page(text, found) == text


def test_the_table_of_the_readme_is_that_of_its_results() -> None:
    """Medians of the three seeds with their range, of the lines of the file themselves."""
    runs: dict[str, list[dict[str, Any]]] = {}
    for one in map(json.loads, (RESULTS / "readme-digits.jsonl").read_text("utf-8").splitlines()):
        runs.setdefault(one["label"], []).append(one)
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(runs) == 7
    for label, of in runs.items():
        (line,) = (one for one in page.splitlines() if one.startswith(f"| `{label}`"))
        shown = []
        for name, form in (("time_to_target_seconds", ".1f"), ("final", ".4f")):
            low, middle, high = (format(one, form) for one in sorted(run[name] for run in of))
            shown.append(f"{middle} ({low}-{high}){'' if name == 'final' else ' s'}")
        shown.append(f"{sorted(100 * run['idle'] for run in of)[1]:.0f} %")
        assert [cell.strip() for cell in line.split("|")[2:-1]] == shown
