"""Figures, made from results only: curves, shares of the ideal, where the time went."""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from offbeat.display.plots import INK, as_svg, new_figure
from offbeat.lab.report.rows import Row, ideal_of, rows_of
from offbeat.lab.report.tables import SHARES, caption, seconds_to, targets_of
from offbeat.lab.results import Result

_WIDTH, _FONT = 4.4, 9  # inches and points: readable where a telephone shows it 350 pixels wide
_WRAP = 26  # letters of a label


def plot(results: Sequence[Result], path: Path) -> None:
    """The curves as PNG.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure, axes = new_figure(8, 4.5, dpi=150)
    _draw_curves(axes, results, "0.3")
    axes.set_title(caption(results), fontsize=8, color="0.3", loc="left", wrap=True)
    at = "lower right" if results[0].higher_is_better else "best"
    axes.legend(frameon=False, fontsize=9, loc=at)
    figure.savefig(path, format="png")


def curves(results: Sequence[Result]) -> str:
    """Metric against training seconds, as SVG: median over seeds, and their range as a band."""
    rows = rows_of(results)
    figure, axes = new_figure(_WIDTH, 3.4 + 0.18 * len(rows), dpi=72)
    _draw_curves(axes, results, INK)
    figure.legend(
        *axes.get_legend_handles_labels(),
        loc="outside lower left",
        frameon=False,
        fontsize=_FONT,
        labelcolor=INK,
    )
    _in_ink(axes)
    return as_svg(figure)


def _draw_curves(axes: Any, results: Sequence[Result], ink: str) -> None:
    one = results[0]
    for number, row in enumerate(rows_of(results)):
        seconds, middle, low, high = curve_of(row)
        colour = f"C{number % 10}"  # of matplotlib's cycle
        dash = "-" if number < 10 else "--"
        axes.plot(seconds, middle, dash, color=colour, marker="o", markersize=3, label=row.name)
        if len(row.runs) > 1:
            axes.fill_between(seconds, low, high, color=colour, alpha=0.2, linewidth=0)
    axes.axhline(one.target, color=ink, linewidth=1, linestyle=":")
    axes.annotate(
        f"target {one.target:g}",
        (1, one.target),
        xycoords=("axes fraction", "data"),
        xytext=(-4, 3),
        textcoords="offset points",
        ha="right",
        fontsize=8,
        color=ink,
    )
    if one.higher_is_better:  # the interesting part is near the target
        worst = min(run.points[0].metric for run in results)
        best = max(point.metric for run in results for point in run.points)
        if best > one.target - 0.25:
            axes.set_ylim(bottom=max(worst - 0.02, one.target - 0.25))
    axes.set_xlim(left=0)
    axes.set_xlabel("training seconds" + (" (simulated)" if one.simulated else ""))
    axes.set_ylabel(one.metric)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


Curve = tuple[list[float], list[float], list[float], list[float]]


def curve_of(row: Row) -> Curve:
    """Of each evaluation the median seconds and metric over the seeds, and the metric's range.

    Where a run has ended earlier than others, as with a limit of time, up to its end.
    """
    columns = [*zip(*(run.points for run in row.runs), strict=False)]
    metrics = [[point.metric for point in column] for column in columns]
    return (
        [statistics.median(point.seconds for point in column) for column in columns],
        [statistics.median(values) for values in metrics],
        [min(values) for values in metrics],
        [max(values) for values in metrics],
    )


def shares(results: Sequence[Result]) -> str | None:
    """The ideal's seconds to ``SHARES`` of its final metric over each method's, as SVG.

    None where the ideal was not run. A target that a run of the method did not reach has no mark.
    """
    rows = rows_of(results)
    ideal = ideal_of(rows)
    if ideal is None:
        return None
    figure, axes = new_figure(_WIDTH, 1.5 + 0.42 * len(rows), dpi=72)
    for number, (share, target) in enumerate(targets_of(ideal).items()):
        best = _usual(ideal, target)
        found = [(i, _usual(row, target)) for i, row in enumerate(rows)]
        known = [(i, 100 * best / usual) for i, usual in found if best and usual]
        axes.plot(
            [value for _, value in known],
            [i for i, _ in known],
            "os^"[number],
            color=f"C{number}",
            markersize=7,
            alpha=0.85,
            label=f"to {100 * share:g} %",
        )
    axes.axvline(100, color=INK, linewidth=1, linestyle=":")
    axes.set_xlim(left=0)
    axes.set_xlabel("% of the ideal's speed")
    _legend_above(figure, axes, len(SHARES))
    _name_rows(axes, [row.name for row in rows])
    return as_svg(figure)


def _usual(row: Row, target: float) -> float | None:
    times = [seconds_to(run, target) for run in row.runs]
    known = [one for one in times if one is not None]
    return statistics.median(known) if known and len(known) == len(times) else None


PARTS = ("computing", "other work", "waiting", "waiting and other")
_COLOURS = ("C0", "C1", "C3", "C7")


def time_split(row: Row, rows: Sequence[Row]) -> dict[str, float]:
    """Shares of ``PARTS`` in a row's training time; medians over seeds, those that there are.

    Computing is what as many steps of the ideal take, where it was run. What a worker worked beyond
    that is other: encoding, averaging, hooks. A peer does not tell its waiting apart from that.
    Without the ideal, computing is all that is not waiting.
    """
    ideal = ideal_of(rows)
    alone = None
    if ideal is not None:
        alone = statistics.median(run.seconds / run.points[-1].step for run in ideal.runs)
    found: dict[str, list[float]] = {}
    for run in row.runs:
        total = run.seconds
        waited = None if run.idle is None else run.idle * total
        worked = total - (waited or 0.0)
        computed = worked if alone is None else min(worked, alone * run.points[-1].step)
        parts = {"computing": computed}
        if waited is not None:
            parts |= {"other work": worked - computed, "waiting": waited}
        elif alone is not None:
            parts |= {"waiting and other": worked - computed}
        else:
            parts = {"waiting and other": total}
        for name, seconds in parts.items():
            found.setdefault(name, []).append(seconds / total if total else math.nan)
    return {name: statistics.median(values) for name, values in found.items()}


def times(results: Sequence[Result]) -> str:
    """Where the training time went, as SVG: a bar a method, of parts that add up to all of it."""
    rows = rows_of(results)
    figure, axes = new_figure(_WIDTH, 1.5 + 0.42 * len(rows), dpi=72)
    split = [time_split(row, rows) for row in rows]
    left = [0.0] * len(rows)
    for part, colour in zip(PARTS, _COLOURS, strict=True):
        values = [100 * one.get(part, 0.0) for one in split]
        if any(values):
            axes.barh(range(len(rows)), values, left=left, color=colour, height=0.6, label=part)
            left = [a + b for a, b in zip(left, values, strict=True)]
    axes.set_xlim(0, 100)
    axes.set_xlabel("% of the training time")
    _legend_above(figure, axes, 2)
    _name_rows(axes, [row.name for row in rows])
    return as_svg(figure)


def _legend_above(figure: Any, axes: Any, columns: int) -> None:
    figure.legend(
        *axes.get_legend_handles_labels(),
        loc="outside upper left",
        frameon=False,
        fontsize=_FONT,
        labelcolor=INK,
        ncols=columns,
        columnspacing=1,
    )


def _name_rows(axes: Any, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), [_wrapped(name) for name in names])
    axes.set_ylim(len(names) - 0.5, -0.5)  # the first above
    axes.grid(axis="x", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    _in_ink(axes)


def _wrapped(name: str) -> str:
    """The name on lines of at most ``_WRAP`` letters, broken behind its punctuation."""
    lines, rest = [], name
    while len(rest) > _WRAP:
        cut = max(rest.rfind(mark, 0, _WRAP) for mark in ",: ") + 1
        cut = cut if cut > 0 else _WRAP
        lines.append(rest[:cut])
        rest = rest[cut:]
    return "\n".join([*lines, rest])


def _in_ink(axes: Any) -> None:
    """Text and axes get the colour of the page."""
    axes.tick_params(colors=INK, labelsize=_FONT)
    for spine in axes.spines.values():
        spine.set_color(INK)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set_color(INK)
        label.set_fontsize(_FONT)
