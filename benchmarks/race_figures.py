"""What the race gave, from its results only: the README's table, and three figures.

The figure of merit of a method in a cell is its median time to ``SHARE`` of the ideal's final
metric; infinite, if a run did not get there.
"""

import math
import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.race_names import EARLIER, is_default, is_diloco, is_peer
from offbeat.display.plots import new_figure
from offbeat.lab.report.rows import Row, ideal_of, rows_of, targets_of
from offbeat.lab.results import Result, read_results

SHARE = 0.98
NONE_YET = "No cell of the race has been run yet."
MARKS = ("<!-- race -->", "<!-- end of the race -->")
"""What a page has before and after the table that it quotes."""


@dataclass(frozen=True)
class Raced:
    """A cell with results.

    Attributes:
        track: Whether learning rates were tuned.
        cell: Its name.
        times: Method → its figure of merit, in seconds.
        merge_over_step: What a mean of all gradients takes on the links, over a step alone.
        seeds: How many.
    """

    track: str
    cell: str
    times: Mapping[str, float]
    merge_over_step: float
    seeds: int

    @property
    def best(self) -> float:
        """The least time of a method, the ideal apart."""
        return min(seconds for name, seconds in self.times.items() if name != "ideal")

    def share(self, method: str) -> float:
        """The ideal's time over that of the method; 0 if it never arrived."""
        return self.times["ideal"] / self.times[method]

    def regret(self, method: str) -> float:
        """How many times longer than the best method it took."""
        return self.times[method] / self.best if math.isfinite(self.best) else math.inf


def read(folder: Path) -> list[Raced]:
    """All cells with results of the ideal and another method, by track and name."""
    found = []
    for path in sorted(folder.glob("race-*-*.jsonl")):
        _, track, cell = path.stem.split("-", 2)
        results = read_results(path)
        if track != EARLIER and cell != "tiny" and len({one.is_ideal for one in results}) == 2:
            found.append(raced(track, cell, results))
    return found


def raced(track: str, cell: str, results: Sequence[Result]) -> Raced:
    """The figures of a cell."""
    rows = rows_of(results)
    ideal = ideal_of(rows)
    assert ideal is not None
    target = targets_of(ideal)[SHARE]
    return Raced(
        track,
        cell,
        {row.name: _usual(row, target) for row in rows},
        _merge_over_step(results, ideal),
        len({one.job.seed for one in results}),
    )


def _usual(row: Row, target: float) -> float:
    times = [run.seconds_to(target) for run in row.runs]
    return statistics.median(math.inf if one is None else one for one in times)


def _merge_over_step(results: Sequence[Result], ideal: Row) -> float:
    """2·(N−1)/N·M over the links' measured bandwidth, over the ideal's step."""
    step = statistics.median(run.seconds / run.points[-1].step for run in ideal.runs)
    speeds = [one.links[0].bytes_per_second for one in results if one.links]
    sizes = [one.model_bytes for one in results if one.model_bytes is not None]
    if not (speeds and sizes):
        return math.nan
    workers = results[0].job.workers
    return 2 * (workers - 1) / workers * sizes[0] / statistics.median(speeds) / step


def table(cells: Sequence[Raced]) -> str:
    """The README's table, as Markdown."""
    if not cells:
        return NONE_YET
    lines = [
        "| track | cell | ideal | default | our DiLoCo | best peer | which |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in cells:
        first = [_first(one.times, kind) for kind in (is_default, is_diloco, is_peer)]
        shown, best = [_shown(one, method) for method in first], first[-1]
        which = "-" if best is None or math.isinf(one.times[best]) else f"`{best}`"
        ideal = _seconds(one.times["ideal"])
        lines.append(f"| {one.track} | {one.cell} | {ideal} | {' | '.join(shown)} | {which} |")
    fewest = min(one.seeds for one in cells)
    return "\n".join(
        [
            *lines,
            "",
            f"Seconds to {100 * SHARE:g} % of the ideal's final metric, median of "
            f"{fewest} seed{'s' * (fewest > 1)} or more; in brackets the share of the ideal: "
            "its seconds over the method's.",
        ]
    )


def _first(times: Mapping[str, float], kind: Callable[[str], bool]) -> str | None:
    """The soonest method of a kind; None if none was run."""
    return min(filter(kind, times), key=lambda name: times[name], default=None)


def _shown(one: Raced, method: str | None) -> str:
    if method is None:
        return "-"
    if math.isinf(one.times[method]):
        return "never"
    return f"{_seconds(one.times[method])} ({100 * one.share(method):.0f} %)"


def _seconds(value: float) -> str:
    return "never" if math.isinf(value) else f"{value:.1f} s"


def quoted(page: str) -> str | None:
    """What a page quotes of the race; None if it quotes nothing."""
    if MARKS[0] not in page:
        return None
    return page.partition(MARKS[0])[2].partition(MARKS[1])[0].strip()


# Figures


def profile(cells: Sequence[Raced], factors: Sequence[float]) -> dict[str, list[float]]:
    """Of each method the share of cells in which it took at most so many times the best's time.

    A cell in which it was not run does not count for it.
    """
    found = {}
    for method in methods_of(cells):
        regrets = [one.regret(method) for one in cells if method in one.times]
        found[method] = [
            sum(regret <= factor for regret in regrets) / len(regrets) for factor in factors
        ]
    return found


def methods_of(cells: Sequence[Raced]) -> list[str]:
    """All but the ideal, in order of appearance."""
    return [*dict.fromkeys(name for one in cells for name in one.times if name != "ideal")]


WIDTH, DPI, FONT = 4.8, 120, 9
"""Inches, and points: what a telephone shows 360 pixels wide can be read."""
MARKERS = "osD^v<>PX*"


def draw(cells: Sequence[Raced], folder: Path) -> list[Path]:
    """Performance profile, share of the ideal, regrets: a picture of each, for each track."""
    paths = []
    for track in dict.fromkeys(one.track for one in cells):
        own = [one for one in cells if one.track == track]
        for name, drawing in (
            ("profile", draw_profile),
            ("share", draw_shares),
            ("regret", _regrets),
        ):
            paths.append(folder / f"race-{track}-{name}.png")
            drawing(own, paths[-1])
    return paths


def canvas(height: float, *, legend: int = 0) -> tuple[Any, Any]:
    """A figure of so many inches, with room for so many lines of a legend below."""
    figure, axes = new_figure(WIDTH, height + 0.19 * legend, dpi=DPI)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=FONT)
    for label in (axes.xaxis.label, axes.yaxis.label, axes.title):
        label.set_fontsize(FONT)
    return figure, axes


def legend_below(figure: Any, axes: Any, columns: int = 1) -> None:
    """What the axes show, below them."""
    told = axes.get_legend_handles_labels()
    figure.legend(*told, loc="outside lower left", frameon=False, fontsize=FONT - 1, ncols=columns)


def wrapped(method: str, width: int = 52) -> str:
    """In lines, for a picture's legend or axis."""
    lines = textwrap.wrap(method.replace(",", ", "), width, break_on_hyphens=False)
    return "\n".join(line.replace(", ", ",") for line in lines)


def draw_profile(cells: Sequence[Raced], path: Path, target: float = SHARE) -> None:
    """In what share of the cells a method took at most so many times the best one's time.

    Args:
        cells: They.
        path: Of the picture.
        target: To this share of the ideal's metric.
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


def draw_shares(cells: Sequence[Raced], path: Path, *further: Sequence[Raced]) -> None:
    """The share of the ideal against T_merge/T_step, a line a method; 0: it never arrived.

    Of further cells the lines are dotted, then dashed.
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


def _regrets(cells: Sequence[Raced], path: Path) -> None:
    methods = methods_of(cells)
    figure, axes = new_figure(3 + 0.5 * len(cells), 1.5 + 0.35 * len(methods), dpi=DPI)
    axes.set_xlim(-0.5, len(cells) - 0.5)
    axes.set_ylim(len(methods) - 0.5, -0.5)
    for x, one in enumerate(cells):
        for y, method in enumerate(methods):
            if method in one.times:
                show_factor(axes, x, y, one.regret(method), 7)
    axes.set_xticks(range(len(cells)), [one.cell for one in cells], rotation=60, ha="right")
    axes.set_yticks(range(len(methods)), [wrapped(one) for one in methods])
    axes.tick_params(labelsize=7)
    axes.set_title("times the best method's time", fontsize=8, loc="left")
    figure.savefig(path)


def show_factor(axes: Any, x: float, y: float, factor: float, size: float, more: str = "") -> None:
    """A factor of time in a box: the redder, the further above 1; the bluer, the further below."""
    most = 4.0  # powers of two
    shade = min(1.0, abs(math.log2(factor)) / most) if math.isfinite(factor) else 1.0
    red = (1, 1 - 0.7 * shade, 1 - 0.9 * shade)
    blue = (1 - 0.9 * shade, 1 - 0.5 * shade, 1)
    box = {"facecolor": red if factor >= 1 else blue, "edgecolor": "none"}
    text = f"{factor:.2f}" if math.isfinite(factor) else "∞"
    axes.text(x, y, text + more, ha="center", va="center", fontsize=size, bbox=box)
