"""Parts that the figures of the race share: axes, legends, profiles, shares, boxes.

A figure is 4.8 inches wide, so that it can be read on a phone that shows it 360 pixels wide.
"""

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.race.simulated_results import CellTimes
from offbeat.display.plots import new_figure

WIDTH, DPI, FONT = 4.8, 120, 9
MARKERS = "osD^v<>PX*"


def canvas(height: float, *, legend: int = 0) -> tuple[Any, Any]:
    """Return a figure and its axes, of this height in inches plus ``legend`` lines below."""
    figure, axes = new_figure(WIDTH, height + 0.19 * legend, dpi=DPI)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=FONT)
    for label in (axes.xaxis.label, axes.yaxis.label, axes.title):
        label.set_fontsize(FONT)
    return figure, axes


def legend_below(figure: Any, axes: Any, columns: int = 1) -> None:
    """Put the legend of the axes below them."""
    entries = axes.get_legend_handles_labels()
    figure.legend(
        *entries, loc="outside lower left", frameon=False, fontsize=FONT - 1, ncols=columns
    )


def wrapped(method: str, width: int = 52) -> str:
    """Return the method's name in lines of a legend or an axis."""
    lines = textwrap.wrap(method.replace(",", ", "), width, break_on_hyphens=False)
    return "\n".join(line.replace(", ", ",") for line in lines)


def methods_of(cells: Sequence[CellTimes]) -> list[str]:
    """Return all methods but the ideal network, in order of appearance."""
    return [*dict.fromkeys(name for one in cells for name in one.times if name != "ideal")]


def profile(cells: Sequence[CellTimes], factors: Sequence[float]) -> dict[str, list[float]]:
    """Return, by method, the share of cells in which it took at most factor × the best time.

    A cell in which a method was not run does not count for it.
    """
    found = {}
    for method in methods_of(cells):
        regrets = [one.regret(method) for one in cells if method in one.times]
        found[method] = [
            sum(regret <= factor for regret in regrets) / len(regrets) for factor in factors
        ]
    return found


def draw_profile(cells: Sequence[CellTimes], path: Path, target: float) -> None:
    """Draw the performance profile: ``profile`` against the factor.

    Args:
        cells: Cells to count.
        path: Path of the picture.
        target: Share of the ideal network's metric that the times are to, for the label.
    """
    names = methods_of(cells)
    figure, axes = canvas(3.2, legend=len(names))
    factors = [2 ** (i / 16) for i in range(16 * 4 + 1)]  # up to 16
    for number, (method, shares) in enumerate(profile(cells, factors).items()):
        style = "-" if number < 10 else "--"
        axes.step(
            factors, shares, style, where="post", color=f"C{number % 10}", label=wrapped(method)
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks([1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"])
    axes.set_ylim(0, 1.03)
    axes.set_xlabel(f"times the best method's time to {100 * target:g} % of the ideal's metric")
    axes.set_ylabel(f"share of {len(cells)} cells")
    legend_below(figure, axes)
    figure.savefig(path)


def draw_shares(cells: Sequence[CellTimes], path: Path, *further: Sequence[CellTimes]) -> None:
    """Draw the share of the ideal network's speed against T_merge/T_step, a line a method.

    The lines of further cells are dotted, then dashed. A run that never arrives has the share 0.
    """
    names = methods_of(cells)
    figure, axes = canvas(3.2, legend=len(names))
    for number, method in enumerate(names):
        for line, some in zip(("-", ":", "--"), (cells, *further), strict=False):
            own = [one for one in some if method in one.times and one.merge_over_step > 0]
            points = sorted((one.merge_over_step, 100 * one.share(method)) for one in own)
            if points:
                axes.plot(
                    *zip(*points, strict=True),
                    f"{MARKERS[number % 10]}{line}",
                    color=f"C{number % 10}",
                    label=wrapped(method) if line == "-" else None,
                    markersize=4,
                    linewidth=1,
                )
    axes.set_xscale("log")
    axes.axhline(100, color="0.5", linewidth=1, linestyle=":")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("T_merge / T_step: a mean of all gradients over a step alone")
    axes.set_ylabel("share of the ideal, %")
    legend_below(figure, axes)
    figure.savefig(path)


def draw_factor(axes: Any, x: float, y: float, factor: float, size: float, more: str = "") -> None:
    """Write a ratio of times in a box: redder the further above 1, bluer the further below."""
    most = 4.0  # powers of two
    shade = min(1.0, abs(math.log2(factor)) / most) if math.isfinite(factor) else 1.0
    red = (1, 1 - 0.7 * shade, 1 - 0.9 * shade)
    blue = (1 - 0.9 * shade, 1 - 0.5 * shade, 1)
    box = {"facecolor": red if factor >= 1 else blue, "edgecolor": "none"}
    text = f"{factor:.2f}" if math.isfinite(factor) else "∞"
    axes.text(x, y, text + more, ha="center", va="center", fontsize=size, bbox=box)
