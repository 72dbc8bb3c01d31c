"""Figures of a comparison: curves, and speeds relative to the ideal.

A *method* is a strategy or a baseline. A *row* is a method with its runs over the seeds. The
*ideal* is the baseline ``ideal``: BSP timed without communication. A *peer* is a method of torch or
another package.
"""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from offbeat.display.narrow import wrapped
from offbeat.display.plots import INK, as_svg, colours_of, new_figure
from offbeat.lab.report.rows import SHARES, Row, ideal_of, rows_of, targets_of
from offbeat.lab.report.tables import caption
from offbeat.lab.results import Result

_WIDTH, _FONT = 4.4, 9  # inches and points: readable at a width of 350 pixels, as on a telephone
_WRAP = 26  # largest number of characters per line of a label


def plot(results: Sequence[Result], path: Path) -> None:
    """Write the curves of the metric over training time as PNG."""
    figure, axes = new_figure(8, 4.5, dpi=150)
    _draw_curves(axes, results, "0.3")
    axes.set_title(caption(results), fontsize=8, color="0.3", loc="left", wrap=True)
    place = "lower right" if results[0].higher_is_better else "best"
    axes.legend(frameon=False, fontsize=9, loc=place)
    figure.savefig(path, format="png")


def curves(results: Sequence[Result]) -> str:
    """Return the curves of the metric over training time as SVG: median and range over seeds."""
    figure, axes = new_figure(_WIDTH, 3.4 + 0.18 * len(rows_of(results)), dpi=72)
    _draw_curves(axes, results, INK)
    _draw_legend(figure, axes, "lower", columns=1)
    _use_page_colour(axes)
    return as_svg(figure)


def _draw_curves(axes: Any, results: Sequence[Result], ink: str) -> None:
    first = results[0]
    rows = rows_of(results)
    colours = colours_of([row.name for row in rows])
    for number, (row, colour) in enumerate(zip(rows, colours, strict=True)):
        seconds, middle, low, high = curve_of(row)
        dash = "-" if number < 10 else "--"
        axes.plot(seconds, middle, dash, color=colour, marker="o", markersize=3, label=row.name)
        if len(row.runs) > 1:
            axes.fill_between(seconds, low, high, color=colour, alpha=0.2, linewidth=0)
    axes.axhline(first.target, color=ink, linewidth=1, linestyle=":")
    axes.annotate(
        f"target {first.target:g}",
        (1, first.target),
        xycoords=("axes fraction", "data"),
        xytext=(-4, 3),
        textcoords="offset points",
        ha="right",
        fontsize=8,
        color=ink,
    )
    if first.higher_is_better:  # enlarge the part near the target
        worst = min(run.points[0].metric for run in results)
        best = max(point.metric for run in results for point in run.points)
        if best > first.target - 0.25:
            axes.set_ylim(bottom=max(worst - 0.02, first.target - 0.25))
    axes.set_xlim(left=0)
    axes.set_xlabel("training seconds" + (" (simulated)" if first.simulated else ""))
    axes.set_ylabel(first.metric)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


Curve = tuple[list[float], list[float], list[float], list[float]]
"""Lists of seconds, median metric, lowest metric and highest metric, one item per evaluation."""


def curve_of(row: Row) -> Curve:
    """Return medians and ranges over the seeds, up to the last evaluation that all runs have."""
    columns = [*zip(*(run.points for run in row.runs), strict=False)]
    metrics = [[point.metric for point in column] for column in columns]
    return (
        [statistics.median(point.seconds for point in column) for column in columns],
        [statistics.median(values) for values in metrics],
        [min(values) for values in metrics],
        [max(values) for values in metrics],
    )


def shares(results: Sequence[Result]) -> str | None:
    """Return a figure of each method's speed relative to the ideal, as SVG.

    The relative speed is the ideal's time to a target, divided by the method's. Each target is a
    share of the ideal's final metric (``SHARES``). Targets that a run did not reach have no mark.

    Returns:
        The figure, or None if the ideal was not run.
    """
    rows = rows_of(results)
    ideal = ideal_of(rows)
    if ideal is None:
        return None
    figure, axes = new_figure(_WIDTH, 1.5 + 0.42 * len(rows), dpi=72)
    for number, (share, target) in enumerate(targets_of(ideal).items()):
        best = ideal.median_seconds_to(target)
        times = [(i, row.median_seconds_to(target)) for i, row in enumerate(rows)]
        marks = [(100 * best / seconds, i) for i, seconds in times if best and seconds]
        axes.plot(
            [value for value, _ in marks],
            [i for _, i in marks],
            "os^"[number],
            color=f"C{number}",
            markersize=7,
            alpha=0.85,
            label=f"to {100 * share:g} %",
        )
    axes.axvline(100, color=INK, linewidth=1, linestyle=":")
    axes.set_xlim(left=0)
    axes.set_xlabel("% of the ideal's speed")
    _draw_legend(figure, axes, "upper", columns=len(SHARES))
    _name_rows(axes, rows)
    return as_svg(figure)


def _draw_legend(figure: Any, axes: Any, place: str, *, columns: int) -> None:
    """Draw the legend above ("upper") or below ("lower") the axes."""
    figure.legend(
        *axes.get_legend_handles_labels(),
        loc=f"outside {place} left",
        frameon=False,
        fontsize=_FONT,
        labelcolor=INK,
        ncols=columns,
        columnspacing=1,
    )


def _name_rows(axes: Any, rows: Sequence[Row]) -> None:
    """Label the vertical axis with the rows' names, the first row at the top."""
    axes.set_yticks(range(len(rows)), [wrapped(row.name, _WRAP) for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.grid(axis="x", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    _use_page_colour(axes)


def _use_page_colour(axes: Any) -> None:
    """Draw text and axes in ``INK``, the text colour of the page."""
    axes.tick_params(colors=INK, labelsize=_FONT)
    for spine in axes.spines.values():
        spine.set_color(INK)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set_color(INK)
        label.set_fontsize(_FONT)
