"""The figure of the headline comparison: how long a run takes, and where it ends."""

import statistics
from pathlib import Path

from benchmarks.harness import RESULTS
from benchmarks.race.studies import HEADLINE
from benchmarks.race.tables import NAMES, cells_of, differences, runs_of
from offbeat.extend import new_figure
from offbeat_lab.report.intervals import interval_of
from offbeat_lab.report.plots import colours_of


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
