"""The ablation's tables on rows made by hand, and that the page quotes what is published."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.ablation import __main__ as ablation
from benchmarks.ablation import tables
from benchmarks.ablation.tables import insert, page_table
from torch import nn

from offbeat.lab.job import Job
from offbeat.lab.recipes import find_recipe

PAGE = Path(__file__).parents[2] / "docs" / "streaming-ablation.md"


def row(method: str, seed: int, end: float, task: str = "cnn", **others: Any) -> dict[str, Any]:
    link = "1Gbit/s" if method == "ideal" else "50Mbit/s"
    cell = {"factor": "default", "task": task, "workers": 4, "bandwidth": link}
    points = [{"seconds": 1.0, "metric": 0.1}, {"seconds": 2.0, "metric": end}]
    return {"cell": cell | {"method": method, "seed": seed} | others, "points": points}


IDEALS = [row("ideal", seed, end) for seed, end in enumerate((0.50, 0.52, 0.51))]
RUNS = [(4, "1Gbit/s", "ideal"), (4, "50Mbit/s", "streaming"), (8, "50Mbit/s", "streaming")]


def line(table: str, number: int) -> list[str]:
    return [cell.strip() for cell in table.splitlines()[number].strip("|").split("|")]


def test_ends_are_compared_under_the_same_seed():
    """Differences 1, 2 and 3 points: the interval of three is their range. Seed 7 has no ideal."""
    rows = [row("streaming", seed, end) for seed, end in enumerate((0.51, 0.54, 0.54))]
    table = page_table([*rows, *IDEALS], RUNS)
    assert line(table, 2) == ["4", "", "`ideal`", "51.0 %", "", "", ""]
    assert line(table, 3)[3:] == ["53.0 %", "+2.0 [+1.0, +3.0]", "", ""]
    alone = page_table([*rows, row("streaming", 7, 0.9), *IDEALS], RUNS)
    assert line(alone, 3)[3:5] == ["62.2 % (4)", "+2.0 [+1.0, +3.0]"]


def test_few_seeds_are_shown_one_by_one():
    rows = [row("streaming", seed, end) for seed, end in ((0, 0.51), (2, 0.50))]
    assert line(page_table([*IDEALS, *rows], RUNS), 3)[3:5] == ["50.5 % (2)", "+1.0, -1.0"]


def test_each_task_has_its_own_ideal_and_each_number_of_workers():
    rows = [row("ideal", 0, 3.25, "lm"), row("streaming", 0, 3.5, "lm")]
    rows += [row("ideal", 0, 9.0, "lm", workers=8), row("streaming", 0, 9.5, "lm", workers=8)]
    table = page_table([*IDEALS, *rows], RUNS)
    assert line(table, 3)[3:] == ["", "", "3.500 (1)", "+0.250"]
    assert line(table, 4)[3:] == ["", "", "9.500 (1)", "+0.500"]


def test_what_was_not_run_has_no_line():
    assert len(page_table(IDEALS, RUNS).splitlines()) == 3


def test_a_run_takes_the_place_of_the_same_run(tmp_path: Path):
    """The factor does not tell runs apart, but that of a full schedule does."""
    path = tmp_path / "published.jsonl"
    ablation.publish([row("streaming", 0, 0.1), row("streaming", 1, 0.2)], path)
    again = [
        row("streaming", 0, 0.3, factor="rate"),
        row("streaming", 0, 0.4, factor="final"),
    ]
    ablation.publish(again, path)
    ends = [one["points"][-1]["metric"] for one in ablation.read(path)]
    assert ends == [0.3, 0.2, 0.4]


def test_a_table_goes_between_the_marks_and_nowhere_else():
    first, last = tables.MARKS
    assert insert(f"a\n{first}\nold\n{last}\nb", "new\n") == f"a\n{first}\nnew\n{last}\nb"
    with pytest.raises(ValueError, match="no"):
        insert(f"a\n{first}\nold", "new\n")


@pytest.mark.pages
def test_the_page_and_the_tables_are_what_is_published():
    assert f"\n{ablation.page_table()}<" in PAGE.read_text()
    rows = ablation.read(ablation.PUBLISHED)
    full = [one for one in rows if one["cell"]["factor"] == "final"]
    others = [one for one in rows if one["cell"]["factor"] != "final"]
    late = tables.slowdown_table(others, ablation.LESS)
    assert (ablation.RESULTS / "ablation.md").read_text() == late
    assert (ablation.RESULTS / "ablation-ends.md").read_text() == tables.finals_table(full)


@pytest.mark.parametrize(
    ("task", "norms", "millions"),
    [("cnn", 0, 2.1), ("cnn-norm", 3, 2.1), ("cnn-large", 0, 8.5)],
)
def test_models_are_what_their_tasks_say(tmp_path: Path, task: str, norms: int, millions: float):
    """BatchNorm behind each of the three convolutions of one, and four times the parameters."""
    images, labels = np.zeros((32, 32, 32, 3), np.uint8), np.zeros(32, np.uint8)
    names = {"x_train": images, "y_train": labels, "x_test": images, "y_test": labels}
    np.savez(tmp_path / "cifar10.npz", **names)
    recipe = ablation.TASKS[task].recipe
    model = find_recipe(recipe).build(Job(recipe, data=str(tmp_path)).setup()).model
    layers = list(model.modules())
    assert round(sum(one.numel() for one in model.parameters()) / 1e6, 1) == millions
    assert sum(isinstance(one, nn.BatchNorm2d) for one in layers) == norms
    assert sum(isinstance(one, nn.Conv2d) for one in layers) == 3
