"""The figure of the headline comparison: slowdown over the link."""

from pathlib import Path

from benchmarks.harness import RESULTS
from benchmarks.race.slowdown import median
from benchmarks.race.studies import HEADLINE, LINKS
from benchmarks.race.tables import NAMES, cells_of, runs_of, slowdowns
from offbeat.display.plots import new_figure
from offbeat.lab.report.intervals import MIN_SEEDS, interval_of

CEILING = 8.0
"""Slowdown at which a method is drawn that is slower, or never arrives with most seeds."""


def draw(workload: str, path: Path, folder: Path = RESULTS) -> None:
    """Draw the median slowdown of the tuned methods of ``headline`` for a workload.

    A point is hollow if some seeds never arrive. If all do, it has the interval of their mean.
    """
    figure, axes = new_figure(4.8, 3.0, dpi=120)
    cells = cells_of("headline", workload, folder)
    for number, method in enumerate(HEADLINE[1:]):
        for x, cell in enumerate(cells):
            runs = runs_of(cell, folder)
            values = slowdowns(runs[method], runs["ideal"])
            known = [one for one in values if one is not None]
            y = min(median(values), CEILING)
            below = above = 0.0
            if len(known) == len(values) >= MIN_SEEDS and y < CEILING:
                interval = interval_of(known)
                below, above = max(0.0, y - interval.low), max(0.0, interval.high - y)
            axes.errorbar(
                x + 0.1 * (number - 1.5),
                y,
                yerr=[[below], [above]],
                fmt="osD^v<>"[number],
                color=f"C{number}",
                markersize=5,
                fillstyle="full" if len(known) == len(values) else "none",
                label=NAMES[method] if x == 0 else None,
            )
    axes.set_yscale("log", base=2)
    axes.set_yticks([1, 1.5, 2, 4, CEILING], ["1", "1.5", "2", "4", "8 or\nnever"])
    axes.axhline(1, color="0.5", linewidth=1, linestyle=":")
    axes.set_xticks(range(len(cells)), [cell.bandwidth for cell in cells])
    axes.set_xlim(-0.5, len(LINKS) - 0.5)
    axes.set_ylabel("time to 98 % / the ideal's")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", frameon=False, ncols=4)
    figure.savefig(path)
