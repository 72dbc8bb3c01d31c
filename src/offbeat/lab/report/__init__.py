"""Tables, figures and pages, made from results only."""

from collections.abc import Sequence
from pathlib import Path

from offbeat.lab.report.figures import plot
from offbeat.lab.report.page import page
from offbeat.lab.report.rows import common_options, groups, rows_of
from offbeat.lab.report.tables import (
    HEADINGS,
    SHARE,
    SHARE_MEANS,
    TUNED_MEANS,
    arrivals,
    caption,
    differences,
    further,
    has_ideal,
    is_tuned,
    links,
    markdown,
    notes,
    table,
)
from offbeat.lab.results import Result

__all__ = [
    "HEADINGS",
    "SHARE",
    "SHARE_MEANS",
    "TUNED_MEANS",
    "arrivals",
    "caption",
    "common_options",
    "differences",
    "further",
    "groups",
    "has_ideal",
    "is_tuned",
    "links",
    "markdown",
    "notes",
    "page",
    "plot",
    "rows_of",
    "table",
    "write_report",
]


def write_report(results: Sequence[Result], output: Path) -> dict[str, Path]:
    """Write ``table.md``, ``plot.png`` and ``report.html`` into ``output``.

    Without matplotlib there is no plot. Returns the paths written, by what they are.
    """
    paths = {"table": output / "table.md"}
    paths["table"].write_text(markdown(results), encoding="utf-8")
    try:
        plot(results, output / "plot.png")
        paths["plot"] = output / "plot.png"
    except ImportError:
        pass
    paths["report"] = output / "report.html"
    paths["report"].write_text(page(results), encoding="utf-8")
    return paths
