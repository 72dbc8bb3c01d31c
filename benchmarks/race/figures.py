"""Figures of comparisons: the headline, and the bars of the README."""

import statistics
from pathlib import Path

from benchmarks.harness import RESULTS
from benchmarks.race.studies import HEADLINE
from benchmarks.race.tables import NAMES, cells_of, differences, runs_of
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
    for mark, method, colour in zip("osD^", methods, colours_of(methods), strict=True):
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
