"""The page ``docs/reproduction.md``: a Jinja template with the results' numbers filled in."""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from benchmarks.harness import RESULTS, ROOT
from benchmarks.papers import (
    choices,
    convergence,
    curvature,
    densities,
    distances,
    exponents,
    gradients,
    noniid,
    orders,
    speedup,
    transformer,
)
from benchmarks.papers.runs import grouped, spread
from benchmarks.papers.runs import speedup as shown

TEMPLATE = Path(__file__).with_name("reproduction.md")
PAGE = ROOT / "docs" / "reproduction.md"
TRIGGER = "trigger / read of every gradient, ResNet-50, 1 thread"
MODULES = (
    *(choices, convergence, curvature, densities, distances, exponents, gradients, noniid, orders),
    *(speedup, transformer),
)


def render() -> str:
    """Return the page.

    Raises:
        UndefinedError: The template names a value that does not exist.
    """
    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters |= {
        "changes": curvature.of_changes,
        "fixed": lambda value, digits: _minus(f"{value:.{digits}f}"),
        "mean": statistics.fmean,
        "median": _median,
        "percent": lambda share, digits=1: _minus(f"{100 * share:.{digits}f}"),
        "seeds": lambda runs: {1: "one seed", 2: "two seeds", 3: "three seeds"}[len(runs)],
        "signed": lambda value, digits: _minus(f"{value:+.{digits}f}"),
        "spread": lambda *arguments: _minus(spread(*arguments)),
    }
    studies = {
        path.stem.removeprefix("papers-"): json.loads(path.read_text())
        for path in RESULTS.glob("papers-*.json")
    }
    trigger = map(json.loads, (RESULTS / "trigger.jsonl").read_text().splitlines())
    return environment.from_string(TEMPLATE.read_text()).render(
        {module.__name__.rpartition(".")[2]: module for module in MODULES},
        data=studies,
        grouped=grouped,
        papers=json.loads((RESULTS / "papers.json").read_text()),  # from the papers' own figures
        pick=_pick,
        shown=shown,
        trigger=[row for row in trigger if row["what"] == TRIGGER][-1],
    )


def _pick(rows: Sequence[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    """Return the only row that has these values."""
    (found,) = (row for row in rows if all(row[key] == one for key, one in fields.items()))
    return found


def _median(values: Sequence[Any], key: str | None = None) -> float:
    """Return the median of numbers, or of a field of rows."""
    return statistics.median(values if key is None else [row[key] for row in values])


def _minus(text: str) -> str:
    """Return the text with the sign − of a negative number."""
    return text.replace("-", "−")
