"""Figures of comparisons: the headline, the sweep of links, and the bars of the README."""

import math
import statistics
from pathlib import Path

from benchmarks.harness import RESULTS
from benchmarks.race.studies import FAST, HEADLINE
from benchmarks.race.tables import (
    NAMES,
    TRAININGS,
    cells_of,
    differences,
    runs_of,
    slowdowns,
    sweeps,
)
from offbeat.extend import new_figure
from offbeat_lab.report.intervals import interval_of
from offbeat_lab.report.plots import colours_of
from offbeat_lab.report.rows import rows_of
from offbeat_lab.results import read_results


def draw(workload: str, path: Path, folder: Path = RESULTS) -> None:
    """Draw each tuned method of ``headline``, with one point for each link.

    A point shows the time of a run divided by the ideal's, and the difference between the final
    metrics with its interval.
    """
    figure, axes = new_figure(4.8, 3.2, dpi=120)
    cells = [runs_of(cell, folder) for cell in cells_of("headline", workload, folder)]
    methods = HEADLINE[1:]
    for mark, method, colour in zip(
        "osD^v<>PX*"[: len(methods)], methods, colours_of(methods), strict=True
    ):
        times, ends = [], []
        for found in cells:
            seconds = [
                statistics.fmean(run.seconds for run in found[name].values())
                for name in (method, "ideal")
            ]
            times.append(seconds[0] / seconds[1])
            ends.append(interval_of(differences(found[method], found["ideal"])))
        below, above = [e.mean - e.low for e in ends], [e.high - e.mean for e in ends]
        axes.errorbar(
            times,
            [one.mean for one in ends],
            yerr=[below, above],
            fmt=f"{mark}-",
            color=colour,
            markersize=5,
            linewidth=1,
            label=NAMES[method],
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks([1, 2, 4, 8, 16, 32, 64], ["1", "2", "4", "8", "16", "32", "64"])
    axes.axhline(0, color="0.5", linewidth=1, linestyle=":")
    axes.set_xlabel("time of a run, divided by the ideal's")
    better = next(iter(cells[0]["ideal"].values())).higher_is_better
    axes.set_ylabel("accuracy − the ideal's, points" if better else "bits per byte − the ideal's")
    if not better:
        axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", frameon=False, ncols=4)
    figure.savefig(path)


MODELS = {
    "124 M, 1 Gbit/s, 0.5 s": 124e6 * 32 / 1e9 / 0.5,
    "1 B, 10 Gbit/s, 1 s": 1e9 * 32 / 10e9 / 1,
    "7 B, 25 Gbit/s, 5 s": 7e9 * 32 / 25e9 / 5,
    "LoRA of 20 M, 1 Gbit/s, 2 s": 20e6 * 32 / 1e9 / 2,
}
"""Trained parameters, link and time of a step → S, the steps that sending them in float32 takes."""


def draw_sweep(path: Path, folder: Path = RESULTS) -> None:
    """Draw time and end of the default against S, with a column for each workload.

    Points of the upper row are mean slowdowns to 90 %; a run that never arrives has none. The lower
    row has the differences of the final metric with intervals. Vertical lines show ``MODELS``.
    """
    found = sweeps(folder)
    shown = [each for each in TRAININGS if any(workload == each for workload, _ in found)]
    figure, axes = new_figure(9, 5.2, dpi=120)
    axes.remove()
    upper, lower = figure.subplots(2, len(shown), sharex=True, squeeze=False)
    for time, end, workload in zip(upper, lower, shown, strict=True):
        for (_, workers), rows in (
            (key, rows) for key, rows in found.items() if key[0] == workload
        ):
            label, steps = f"{workers} workers", [s for s, _, _ in rows]
            slow = [slowdowns(runs, ideal, FAST) for _, runs, ideal in rows]
            means = [math.nan if None in one else statistics.fmean(one) for one in slow]
            time.plot(steps, means, "o-", markersize=4, label=label)
            ends = [interval_of(differences(runs, ideal)) for _, runs, ideal in rows]
            low, high = [e.mean - e.low for e in ends], [e.high - e.mean for e in ends]
            middle = [e.mean for e in ends]
            end.errorbar(steps, middle, yerr=[low, high], fmt="o-", markersize=4, label=label)
        for text, steps in MODELS.items():
            time.axvline(steps, color="0.6", linewidth=0.8, linestyle=":")
            end.axvline(steps, color="0.6", linewidth=0.8, linestyle=":")
            time.annotate(
                text,
                (steps, 1),
                (2, -2),
                xycoords=("data", "axes fraction"),
                textcoords="offset points",
                rotation=90,
                va="top",
                fontsize="x-small",
                color="0.4",
            )
        time.set(title=TRAININGS[workload], xscale="log")
        better = any(next(iter(ideal.values())).higher_is_better for *_, ideal in rows)
        end.set(xlabel="S: time to send the model in float32, in steps")
        end.set_ylabel("accuracy − the ideal's, points" if better else "bits − the ideal's")
        if not better:
            end.invert_yaxis()
    upper[0].set_ylabel("time to 90 % / the ideal's")
    lower[0].legend(frameon=False, fontsize="small", loc="lower left")
    figure.savefig(path)


def draw_times(results: Path, path: Path) -> None:
    """Draw a bar for each method of a results file: the time to the target, and the idle share.

    A bar shows the median over the seeds, and a line its range. The hatched part is the time that a
    worker waits, at the method's median idle share of the whole run. Methods that did not reach the
    target with every seed are left out.
    """
    rows = [row for row in rows_of(read_results(results)) if row.seconds_to_target is not None]
    figure, axes = new_figure(8, 2.6, dpi=120)
    for place, (row, colour) in enumerate(
        zip(rows, colours_of([row.name for row in rows]), strict=True)
    ):
        times = [s for run in row.runs if (s := run.time_to_target_seconds) is not None]
        middle = statistics.median(times)
        idle = statistics.median(run.idle or 0 for run in row.runs)
        axes.barh(place, middle * (1 - idle), color=colour)
        axes.barh(
            *(place, middle * idle),
            left=middle * (1 - idle),
            color="white",
            edgecolor=colour,
            hatch="////",
        )
        axes.plot([min(times), max(times)], [place, place], color="0.2", linewidth=1.5)
        text = f"{middle:.1f} s" + (f", idle {idle:.0%}" if idle else "")
        axes.annotate(text, (max(times), place), (5, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.invert_yaxis()
    axes.set_xlim(right=1.2 * axes.get_xlim()[1])
    axes.set_xlabel(
        f"seconds to {rows[0].runs[0].metric} {rows[0].runs[0].target:g}; hatched: waiting"
    )
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
