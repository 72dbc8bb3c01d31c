"""The page that quotes the race: ``python -m benchmarks evidence`` makes it from the results.

It draws the figures into ``results/`` and ``docs/images/``. In ``docs/evidence.md`` it rewrites the
first table of each section of ``tables``. A test compares the tables with the results.
"""

import re
import shutil
from pathlib import Path

from benchmarks.harness import IMAGES, RESULTS, ROOT
from benchmarks.race import figures
from benchmarks.race.curves import EARLY_SECONDS, SECONDS, covers, curves
from benchmarks.race.figures import REAL, cells_in_order, simulated_and_real
from benchmarks.race.methods import short_name
from benchmarks.race.simulated_results import against_best_rival, read
from benchmarks.race.simulated_settings import OTHERS
from benchmarks.race.simulated_tables import (
    corners_table,
    map_table,
    others_table,
    tuning_table,
)
from benchmarks.race.tables import against, every_method, overview

PAGE, README = ROOT / "docs" / "evidence.md", ROOT / "README.md"
RIVAL = "diloco:period=16"
"""Our strongest rival on real links, and the one with most runs."""


def draw_all(folder: Path = RESULTS) -> list[Path]:
    """Draw all figures, and copy them to the pages."""
    paths = figures.draw(read(folder), folder)
    for path in paths:
        shutil.copy(path, IMAGES)
    return paths


def reality_table(folder: Path = RESULTS) -> str:
    """Return the slowdowns in virtual time and on real processes."""
    lines = ["| link | method | after | simulated | measured |", "|--:|---|--:|--:|--:|"]
    for cell, method, at, virtual, real in simulated_and_real(folder):
        shown = ["never" if one is None else f"{one:.2f}" for one in (virtual, real)]
        name = short_name(method)
        lines.append(f"| {REAL[cell]} | `{name}` | {at:g} s | {' | '.join(shown)} |")
    return "\n".join(lines)


def tables(folder: Path = RESULTS) -> dict[str, str]:
    """Return the first table of each section of the page that has results."""
    rows = read(folder)
    found = {
        "On real processes": overview(cells_in_order(folder)),
        "Every method": every_method(folder, SECONDS),
    }
    early = [cell for cell, (runs, _) in curves(folder).items() if not covers(runs, SECONDS)]
    if early:
        found["A small model on real processes"] = every_method(folder, EARLY_SECONDS, only=early)
    if tuned := every_method(folder, SECONDS, "tuned"):
        found["With rates tuned"] = tuned
    if paired := against(folder, SECONDS, RIVAL):
        found["Streaming, less late than DiLoCo"] = paired
    if rows:
        found["On simulated links"] = map_table(rows)
        if any(row["cell"] in OTHERS for row in rows):
            found["Uneven workers, and more of them"] = others_table(rows)
        if any(row["workload"] == "cnn" for row in rows):
            found["A larger model"] = corners_table(rows)
        if against_best_rival(rows, "tuned"):
            found["What tuning took"] = tuning_table(rows)
    if simulated_and_real(folder):
        found["The simulator against real processes"] = reality_table(folder)
    return {section: table for section, table in found.items() if table}


def page(text: str, folder: Path = RESULTS) -> str:
    """Return the text of the page with its tables made again.

    Raises:
        ValueError: The page lacks a section that has results, or the section lacks a table.
    """
    for section, table in tables(folder).items():
        heading = f"\n## {section}\n"
        if heading not in text:
            raise ValueError(f"the page has no section {section!r}")
        before, _, after = text.partition(heading)
        old = re.search(r"(?:^\|.*\n)+", after, flags=re.MULTILINE)
        if old is None:
            raise ValueError(f"section {section!r} of the page has no table")
        after = f"{after[: old.start()]}{table}\n{after[old.end() :]}"
        text = before + heading + after
    return text


def main() -> None:
    """Draw all figures, and write the page."""
    for path in draw_all():
        print(path)
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(PAGE)


if __name__ == "__main__":
    main()
