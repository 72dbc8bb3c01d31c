"""The tables of the pages on memory and on bfloat16 agree with the results."""

import json
from typing import Any

import pytest
from benchmarks.harness import RESULTS, ROOT

PAGES = {"Memory": "streaming", "Parameters in bfloat16": "quantization"}


def rows(heading: str) -> list[list[str]]:
    """Return the cells of the first table below a heading of its page."""
    text = (ROOT / "docs" / f"{PAGES[heading]}.md").read_text(encoding="utf-8")
    lines = text.partition(f"# {heading}\n")[2].partition("\n## ")[0].splitlines()
    table = [line for line in lines if line.startswith("|")][2:]
    return [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in table]


def read(name: str) -> list[dict[str, Any]]:
    lines = (RESULTS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_where_bfloat16_ends() -> None:
    ends = {
        (r["method"], r["lr"], r["dtype"], r["stochastic"], r["seed"]): r["bits per byte"]
        for r in read("bfloat16")
        if r.get("mechanism", "residual") == "residual"
        or r["method"] == "ideal"
        or r["dtype"] == "float32"
    }
    table = rows("Parameters in bfloat16")
    assert len(table) == 6
    for name, rate, *cells in table:
        key = name.partition(",")[0], float(rate)
        for cell, stochastic in zip(cells, (True, False), strict=True):
            found = [
                ends[*key, "bfloat16", stochastic, seed] - ends[*key, "float32", False, seed]
                for seed in range(3)
                if (*key, "bfloat16", stochastic, seed) in ends
            ]
            shown = f"{min(found):+.3f} to {max(found):+.3f}" if found else "not run"
            assert cell == shown, name


@pytest.mark.parametrize(("column", "dtype"), [(1, "float32"), (2, "bfloat16")])
def test_memory_is_as_documented(column: int, dtype: str) -> None:
    """Within 5 % of the measured bytes per parameter, with 105 million of them."""
    last = [r for r in read("memory") if r["config"]["layers"] == 100]
    found = {r["what"].rpartition(": ")[2]: r["value"] for r in last if dtype in r["what"]}
    phases = [("attach", "attached"), ("steps", "save"), ("consensus",), ("load",), ("loaded",)]
    for row, names in zip(rows("Memory"), phases, strict=True):
        for name in names:
            assert float(row[column]) == pytest.approx(found[name], rel=0.05), name
    # The formulas of the last column, with the share of the model in a message.
    always = 4 + 2 * (dtype == "bfloat16")
    steps = always + 0.12 * (4 + 0.26 * 3)
    model, file = (4, 16) if dtype == "float32" else (2, 12)
    for value, name in (
        (always, "attach"),
        (steps, "steps"),
        (always + model + 30e6 / 105e6, "consensus"),
        (always + file, "load"),
    ):
        assert value == pytest.approx(found[name], rel=0.05), name
