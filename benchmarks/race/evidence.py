"""The page that quotes the comparisons: ``python -m benchmarks evidence`` makes its tables.

It rewrites the first table of some sections of ``docs/evidence.md`` and ``results/headline.md``
from the results, and draws the figures into ``docs/images/``. A test compares the tables with the
results.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from benchmarks.harness import IMAGES, RESULTS, ROOT
from benchmarks.race import figures, tables

PAGE = ROOT / "docs" / "evidence.md"
HEADLINE = RESULTS / "headline.md"
WORKLOADS = {"cnn": "CNN with SGD", "transformer": "Transformer with AdamW"}
"""Workload → the name of its sections."""


def draw_all(folder: Path = RESULTS) -> list[Path]:
    """Draw all figures, and return their paths."""
    paths = []
    for workload in WORKLOADS:
        if tables.cells_of("headline", workload, folder):
            paths.append(IMAGES / f"race-{workload}.png")
            figures.draw(workload, paths[-1], folder)
    if tables.sweeps(folder):
        paths.append(IMAGES / "race-sweep.png")
        figures.draw_sweep(paths[-1], folder)
    if (results := folder / "readme-digits.jsonl").exists():
        paths.append(IMAGES / "digits-100mbit.png")
        figures.draw_times(results, paths[-1])
    return paths


def sections(folder: Path = RESULTS) -> dict[str, str]:
    """Return the table of each section of the page that has results."""
    found = {"What to expect": tables.expectations(folder)}
    for workload, name in WORKLOADS.items():
        found[name] = tables.links(workload, folder)
    found |= {
        "From fast to slow links": tables.sweep(folder),
        "Seeds that were not used before": tables.ten(folder),
        "Sixteen workers and uneven links": tables.elsewhere(folder),
        "Other trainings": tables.features(folder),
        "Real processes": tables.real(folder),
        "Skewed labels": tables.skewed(folder),
        "Uneven machines": tables.uneven(folder),
    }
    return {section: table for section, table in found.items() if table.count("\n") > 1}


def headline(folder: Path = RESULTS) -> dict[str, str]:
    """Return the tables of ``results/headline.md``, which are too long for the page."""
    found = {name: tables.tuned(workload, folder) for workload, name in WORKLOADS.items()}
    for workload, name in WORKLOADS.items():
        found[f"{name}, other learning rates"] = tables.rates(workload, folder)
    found["Seeds that were not used before"] = tables.fresh(folder)
    found["Longer steps of Adam"] = tables.adam(folder)
    found["Many workers"] = tables.many(folder)
    found["A worker dies, another one joins"] = tables.elastic(folder)
    return {section: table for section, table in found.items() if table.count("\n") > 1}


def page(text: str, sections: Mapping[str, str]) -> str:
    """Return the text of a page with the table of each section made again.

    Raises:
        ValueError: The page lacks one of the sections, or the section lacks a table.
    """
    for section, table in sections.items():
        heading = re.search(rf"\n##+ {re.escape(section)}\n", text)
        if heading is None:
            raise ValueError(f"the page has no section {section!r}")
        before, after = text[: heading.end()], text[heading.end() :]
        old = re.search(r"(?:^\|.*\n)+", after.partition("\n## ")[0], flags=re.MULTILINE)
        if old is None:
            raise ValueError(f"section {section!r} of the page has no table")
        text = f"{before}{after[: old.start()]}{table}\n{after[old.end() :]}"
    return text


def main() -> None:
    """Draw all figures, and write the page."""
    for path in draw_all():
        print(path)
    for path, found in ((PAGE, sections()), (HEADLINE, headline())):
        path.write_text(page(path.read_text(encoding="utf-8"), found), encoding="utf-8")
        print(path)
