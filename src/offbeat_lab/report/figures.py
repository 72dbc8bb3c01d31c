"""Curves of the metric over training time, one for each row of a comparison.

A *row* is a method (strategy or reference) with its runs over the seeds.
"""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from offbeat.extend import new_figure
from offbeat_lab.report.plots import colours_of
from offbeat_lab.report.rows import Row, rows_of
from offbeat_lab.report.tables import caption
from offbeat_lab.results import Result

_INK = "0.3"  # grey of text and lines


def plot(results: Sequence[Result], target: Path | BinaryIO) -> None:
    """Write the curves of the metric over training time as PNG: median and range over seeds."""
    figure, axes = new_figure(8, 4.5, dpi=150)
    _draw_curves(axes, results)
    axes.set_title(caption(results), fontsize=8, color=_INK, loc="left", wrap=True)
    place = "lower right" if results[0].higher_is_better else "best"
    axes.legend(frameon=False, fontsize=9, loc=place)
    figure.savefig(target, format="png")


def _draw_curves(axes: Any, results: Sequence[Result]) -> None:
    first = results[0]
    rows = rows_of(results)
    colours = colours_of([row.name for row in rows])
    for number, (row, colour) in enumerate(zip(rows, colours, strict=True)):
        seconds, middle, low, high = curve_of(row)
        dash = "-" if number < 10 else "--"
        axes.plot(seconds, middle, dash, color=colour, marker="o", markersize=3, label=row.name)
        if len(row.runs) > 1:
            axes.fill_between(seconds, low, high, color=colour, alpha=0.2, linewidth=0)
    axes.axhline(first.target, color=_INK, linewidth=1, linestyle=":")
    axes.annotate(
        f"target {first.target:g}",
        (1, first.target),
        xycoords=("axes fraction", "data"),
        xytext=(-4, 3),
        textcoords="offset points",
        ha="right",
        fontsize=8,
        color=_INK,
    )
    if first.higher_is_better:  # enlarge the part near the target
        worst = min(run.points[0].metric for run in results)
        best = max(point.metric for run in results for point in run.points)
        if best > first.target - 0.25:
            axes.set_ylim(bottom=max(worst - 0.02, first.target - 0.25))
    axes.set_xlim(left=0)
    reached = [row.seconds_to_target for row in rows]
    if all(reached):  # the rest of the runs is flat
        axes.set_xlim(right=min(axes.get_xlim()[1], 1.5 * max(filter(None, reached))))
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
