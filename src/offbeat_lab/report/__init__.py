"""Reports of a comparison of training methods: tables, figures and an HTML page."""

from collections.abc import Sequence
from pathlib import Path

from offbeat_lab.report.comparisons import differences, other_tables, times_to_targets, tuning
from offbeat_lab.report.figures import plot
from offbeat_lab.report.page import page
from offbeat_lab.report.tables import (
    HEADINGS,
    SHARE,
    SHARE_MEANS,
    caption,
    notes,
    other_metrics,
    table,
)
from offbeat_lab.results import Result, writing
from offbeat_lab.tuning import without_trials

__all__ = [
    "HEADINGS",
    "SHARE",
    "SHARE_MEANS",
    "caption",
    "differences",
    "markdown",
    "notes",
    "other_metrics",
    "other_tables",
    "page",
    "plot",
    "table",
    "times_to_targets",
    "tuning",
    "without_trials",
    "write_report",
]


def markdown(results: Sequence[Result]) -> str:
    """Return the tables as Markdown, with captions, notes and the final values of other metrics."""
    others, results = other_tables(results), without_trials(results)
    parts = [table(results).markdown(), *(f"{note}\n" for note in notes(results))]
    parts += [other.markdown() for other in others.values()]
    lines = [f"- `{method}`: {values}\n" for method, values in other_metrics(results)]
    if lines:
        parts += ["At the end:\n", "".join(lines)]
    return "\n".join(parts)


def write_report(results: Sequence[Result], output: Path) -> dict[str, Path]:
    """Write ``table.md``, ``plot.png`` and ``report.html`` into the directory ``output``.

    The directory must exist.

    Returns:
        Paths of the written files, by the keys "table", "plot" and "report".
    """
    paths = {"table": output / "table.md"}
    with writing(paths["table"]):
        paths["table"].write_text(markdown(results), encoding="utf-8")
    paths["plot"] = output / "plot.png"
    with writing(paths["plot"]):
        plot(without_trials(results), paths["plot"])
    paths["report"] = output / "report.html"
    with writing(paths["report"]):
        paths["report"].write_text(page(results), encoding="utf-8")
    return paths
