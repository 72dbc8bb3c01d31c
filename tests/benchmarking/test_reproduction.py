"""docs/reproduction.md quotes its results, and every figure in its first table has a verdict."""

import json
import re
import statistics

import pytest
from benchmarks.papers import reproduction

PAGE = reproduction.PAGE.read_text(encoding="utf-8")
VERDICTS = (
    *("**reproduced**", "**in part**", "**not at this scale**", "**undecided**", "**not tried**"),
)


def verdicts(page: str) -> list[tuple[str, str]]:
    """Return figure and verdict of each row of the page's first table."""
    rows = [line for line in page.partition("\n|")[2].partition("\n\n")[0].split("\n|")][2:]
    fields = [[one.strip() for one in row.strip(" |").split(" | ")] for row in rows]
    return [(one[0], one[-1]) for one in fields]


def test_the_page_is_made_from_the_results():
    """Run ``python -m benchmarks.papers`` after a change of either."""
    assert reproduction.render() == PAGE


def test_every_figure_has_a_verdict():
    found = verdicts(PAGE)
    assert len(found) > 10
    for figure, verdict in found:
        assert verdict.startswith(VERDICTS), figure


def test_a_row_without_a_verdict_is_found():
    page = "\n# T\n\n| figure | verdict |\n|---|---|\n| 1 | **reproduced** |\n| 2 | - |\n\nText\n"
    assert verdicts(page) == [("1", "**reproduced**"), ("2", "-")]


@pytest.mark.parametrize("task", ["cifar"])
def test_numbers_of_the_page_are_those_of_the_file(task: str):
    """BSP's row, read from the file without the code that writes tables."""
    path = reproduction.RESULTS / "papers-convergence.json"
    best = json.loads(path.read_text())["facts"][task][0]["best"]
    rows = re.findall(r"^\| BSP \| \d+ \| 0\.000 \| ([0-9.]+) ", PAGE, re.MULTILINE)
    assert f"{100 * statistics.median(best):.1f}" in rows
