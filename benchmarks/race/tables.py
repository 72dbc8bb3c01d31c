"""Tables of the race on real processes, as Markdown, from its results only."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.race.curves import (
    Cells,
    Curves,
    covers,
    curves,
    curves_of,
    mean_slowdown,
    read,
    seconds_of,
    slowdowns,
    workload_of,
)
from benchmarks.race.earlier_clock import has_known_speed
from benchmarks.race.methods import DILOCO, is_default, is_peer, short_name
from benchmarks.race.slowdown import Points, slowdown, summary
from offbeat.lab.report.intervals import MIN_SEEDS
from offbeat.lab.report.rows import rows_of

UNCORRECTED = " †"
"""Mark of a row with runs that neither controlled nor measured the time of a step."""


def every_method(
    folder: Path,
    seconds: Sequence[float],
    track: str = "defaults",
    *,
    steady: bool = False,
    seeds: int | None = None,
    only: Sequence[str] = (),
) -> str:
    """Return a row with the slowdowns of each method in each cell; empty if no cell is left.

    Cells whose ideal network has no metric at all of the seconds are left out.

    Args:
        folder: Directory of the results.
        seconds: Seconds of the ideal network.
        track: Track to show.
        steady: True for one step time for all ideal runs of a workload; see ``curves.read``.
        seeds: Largest number of seeds, so that methods with more seeds are compared fairly.
        only: Names of cells; without names all.
    """
    lines = [
        "| cell | method | " + " | ".join(f"{at:g} s" for at in seconds) + " | a step | seeds |"
    ]
    lines.append("|---|---|" + "--:|" * (len(seconds) + 2))
    for cell, results in read(folder, track, steady=steady).items():
        cell_curves, less = curves_of(results), not results[0].higher_is_better
        if (only and cell not in only) or not covers(cell_curves, seconds):
            continue
        for row in rows_of(results):
            own = {
                seed: points
                for seed, points in cell_curves[row.name].items()
                if seeds is None or seed < seeds
            }
            runs = [run for run in row.runs if run.job.seed in own]
            if not runs:
                continue
            both = {"ideal": cell_curves["ideal"], row.name: own}
            shown = [summary(slowdowns(both, row.name, at, less=less)) for at in seconds]
            ends = [(own[run.job.seed][-1][0], run.points[-1].step) for run in runs]
            step = statistics.median(duration / steps for duration, steps in ends)
            corrected = all(map(has_known_speed, runs))
            shown.append(f"{1000 * step:.0f} ms")
            shown.append(f"{len(runs)}{'' if corrected else UNCORRECTED}")
            lines.append(f"| {cell} | `{short_name(row.name)}` | {' | '.join(shown)} |")
    return "\n".join(lines) if len(lines) > 2 else ""


def overview(cells: Cells) -> str:
    """Return a row for each cell: the default, our DiLoCo and the nearest peer, means over seeds.

    The nearest peer has the smallest slowdown after the last of the seconds.
    """
    lines = ["| cell | after | streaming | DiLoCo | nearest peer | which | seeds |"]
    lines.append("|---|--:|--:|--:|--:|---|--:|")
    for cell, (runs, less) in cells.items():
        last = {
            name: mean_slowdown(runs, name, seconds_of(runs)[-1], less=less)
            for name in filter(is_peer, runs)
        }
        known = {name: one for name, one in last.items() if one is not None}
        peer = min(known, key=lambda name: known[name], default="")
        default = next(filter(is_default, runs), "")
        shown = [", ".join(f"{at:g}" for at in seconds_of(runs)) + " s"]
        shown += [_means(runs, name, less=less) for name in (default, DILOCO, peer)]
        shown.append(f"`{peer}`" if peer else "-")
        counted = [one for one in (default, DILOCO, peer) if one in runs]
        shown.append(", ".join(str(len(runs[one])) for one in counted))
        lines.append(f"| {cell} | {' | '.join(shown)} |")
    return "\n".join(lines) if len(lines) > 2 else ""


def _means(runs: Curves, method: str, *, less: bool) -> str:
    if method not in runs:
        return "-"
    found = [mean_slowdown(runs, method, at, less=less) for at in seconds_of(runs)]
    return ", ".join("never" if one is None else f"{one:.2f}" for one in found)


def against(folder: Path, seconds: Sequence[float], rival: str, track: str = "defaults") -> str:
    """Return by how much the default's slowdown is below a rival's; empty if no row is left.

    Each value is the mean difference under the same seed, with its interval. There is a row for
    each cell in which both arrive under three seeds or more, and a row for all runs of a workload,
    over cells and seeds, if there are three. Cells that the ideal network does not cover are left
    out.

    Args:
        folder: Directory of the results.
        seconds: Seconds of the ideal network.
        rival: Start of the other method's text; the first method that fits is taken.
        track: Track to show.
    """
    lines = ["| cell | " + " | ".join(f"{at:g} s" for at in seconds) + " | runs |"]
    lines.append("|---|" + "--:|" * (len(seconds) + 1))
    pooled: dict[str, list[list[float]]] = {}
    for cell, (runs, less) in curves(folder, track).items():
        if not covers(runs, seconds):
            continue
        own = next((runs[name] for name in runs if is_default(name)), {})
        other = next((runs[name] for name in runs if name.startswith(rival)), {})
        found = []
        for seed in sorted(own.keys() & other.keys()):
            pair, ideal = (own[seed], other[seed]), runs["ideal"][seed]
            values = [_difference(*pair, ideal, at, less=less) for at in seconds]
            found.append([value for value in values if value is not None])
        if any(len(values) < len(seconds) for values in found):
            continue
        pooled.setdefault(workload_of(cell), []).extend(found)
        if len(found) >= MIN_SEEDS:
            lines.append(_row(cell, found))
    lines += [_row(f"all of {name}", of) for name, of in pooled.items() if len(of) >= MIN_SEEDS]
    return "\n".join(lines) if len(lines) > 2 else ""


def _row(name: str, runs: Sequence[Sequence[float]]) -> str:
    """Return a row of the table; each run has one value for each of the seconds."""
    shown = " | ".join(summary(of) for of in zip(*runs, strict=True))
    return f"| {name} | {shown} | {len(runs)} |"


def _difference(
    own: Points, other: Points, ideal: Points, at: float, *, less: bool
) -> float | None:
    mine, theirs = (slowdown(one, ideal, at, lower_is_better=less) for one in (own, other))
    return None if mine is None or theirs is None else theirs - mine
