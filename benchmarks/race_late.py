"""How late every method of the race is on real processes, cell by cell; from its results only."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks import lateness, paces
from benchmarks.race_names import EARLIER, OURS, is_default, is_peer, short
from offbeat.lab.report.intervals import interval_of
from offbeat.lab.report.rows import rows_of
from offbeat.lab.results import Result

SECONDS = (10.0, 20.0, 30.0)
SOON = (2.0, 4.0, 6.0)
"""Of the ideal, at which lateness is told; the latter where it has ended by then."""
_SEEDS = 3
"""For an interval, at least."""
OLD = " †"
"""Beside the seeds of a row: not all of its runs took turns, so they are told as they were."""
Curves = dict[str, dict[int, list[tuple[float, float]]]]
"""Method → seed → seconds and metric of each evaluation; of seeds that the ideal has, too."""


Cells = Mapping[str, tuple[Curves, bool]]
"""By name; and whether less of its metric is better."""


def curves(folder: Path, track: str = "defaults") -> dict[str, tuple[Curves, bool]]:
    """Of every cell of a track, by its name; and whether less of its metric is better."""
    return {
        cell: (_curves(results), not results[0].higher_is_better)
        for cell, results in paces.read(folder, track).items()
    }


def _curves(results: Sequence[Result]) -> Curves:
    seeds = {one.job.seed for one in results if one.is_ideal}
    return {
        row.name: {run.job.seed: _points(run) for run in row.runs if run.job.seed in seeds}
        for row in rows_of(results)
    }


def covers(runs: Curves, seconds: Sequence[float]) -> bool:
    """Whether the ideal was looked at by then, and trained so long, under each seed.

    Else there is nothing to hold against it at these seconds.
    """
    return all(
        points[0][0] <= min(seconds) and max(seconds) <= points[-1][0]
        for points in runs["ideal"].values()
    )


def seconds_of(runs: Curves) -> Sequence[float]:
    """The seconds at which the lateness in a cell is told; none, if its ideal covers neither."""
    return next((few for few in (SECONDS, SOON) if covers(runs, few)), ())


def late(
    folder: Path,
    seconds: Sequence[float],
    track: str = "defaults",
    *,
    steady: bool = False,
    seeds: int | None = None,
    only: Sequence[str] = (),
) -> str:
    """How many times as long each method takes to what the ideal has after so many seconds.

    Cells whose ideal was not looked at yet, or has ended, are left out; empty if none is left.

    Args:
        folder: Of the results.
        seconds: Of the ideal.
        track: Which runs.
        steady: With one step for all ideals of a workload; see ``paces.read``.
        seeds: Only the first so many, so that who has more of them is not compared under others.
        only: Cells with these names; none: all.
    """
    lines = [
        "| cell | method | " + " | ".join(f"{at:g} s" for at in seconds) + " | a step | seeds |"
    ]
    lines.append("|---|---|" + "--:|" * (len(seconds) + 2))
    for cell, results in paces.read(folder, track, steady=steady).items():
        if only and cell not in only:
            continue
        methods = _curves(results)
        if not covers(methods, seconds):
            continue
        for row in rows_of(results):
            own = {
                row.name: {
                    seed: points
                    for seed, points in methods[row.name].items()
                    if seeds is None or seed < seeds
                }
            }
            runs = [run for run in row.runs if run.job.seed in own[row.name]]
            if not runs:
                continue
            (name, *found), *_ = lateness.table(
                own, methods["ideal"], seconds, less=not results[0].higher_is_better
            )
            ends = [(own[row.name][run.job.seed][-1][0], run.points[-1].step) for run in runs]
            step = statistics.median(seconds / steps for seconds, steps in ends)
            turned = track == EARLIER or all(run.is_ideal or run.turns for run in runs)
            shown = " | ".join(
                [*found, f"{1000 * step:.0f} ms", f"{len(runs)}{'' if turned else OLD}"]
            )
            lines.append(f"| {cell} | `{short(name)}` | {shown} |")
    return "\n".join(lines) if len(lines) > 2 else ""


def overview(cells: Cells) -> str:
    """A line a cell: the default, our DiLoCo and the nearest peer, each its mean over its seeds.

    The nearest is the one that is least late at the last of the seconds.
    """
    lines = ["| cell | after | streaming | DiLoCo | nearest peer | which | seeds |"]
    lines.append("|---|--:|--:|--:|--:|---|--:|")
    for cell, (runs, less) in cells.items():
        last = {
            name: late_at(runs, name, seconds_of(runs)[-1], less=less)
            for name in filter(is_peer, runs)
        }
        known = {name: one for name, one in last.items() if one is not None}
        peer = min(known, key=lambda name: known[name], default="")
        own = next(filter(is_default, runs), "")
        shown = [", ".join(f"{at:g}" for at in seconds_of(runs)) + " s"]
        shown += [_means(runs, name, less=less) for name in (own, OURS, peer)]
        shown.append(f"`{peer}`" if peer else "-")
        shown.append(", ".join(str(len(runs[one])) for one in (own, OURS, peer) if one in runs))
        lines.append(f"| {cell} | {' | '.join(shown)} |")
    return "\n".join(lines) if len(lines) > 2 else ""


def _means(runs: Curves, method: str, *, less: bool) -> str:
    if method not in runs:
        return "-"
    found = [late_at(runs, method, at, less=less) for at in seconds_of(runs)]
    return ", ".join("never" if one is None else f"{one:.2f}" for one in found)


def against(folder: Path, seconds: Sequence[float], rival: str, track: str = "defaults") -> str:
    """How much less late the default is than a rival, a cell a line, and all runs of a workload.

    The mean of the differences under the same seed, in times of the ideal, with its interval; of
    cells in which both arrive under three seeds or more; and of all runs of a workload, if there
    are three, over cells and seeds. Cells whose ideal trains too short are left out; empty if
    nothing is left.

    Args:
        folder: Of the results.
        seconds: Of the ideal.
        rival: What the other method's text begins with, the first that does.
        track: Which runs.
    """
    lines = ["| cell | " + " | ".join(f"{at:g} s" for at in seconds) + " | runs |"]
    lines.append("|---|" + "--:|" * (len(seconds) + 1))
    every: dict[str, list[list[float]]] = {}
    for cell, (runs, less) in curves(folder, track).items():
        if not covers(runs, seconds):
            continue
        own = next((runs[name] for name in runs if is_default(name)), {})
        other = next((runs[name] for name in runs if name.startswith(rival)), {})
        found = []
        for seed in sorted(own.keys() & other.keys()):
            pair, ideal = (own[seed], other[seed]), runs["ideal"][seed]
            one = [_less_late(*pair, ideal, at, less=less) for at in seconds]
            found.append([value for value in one if value is not None])
        if any(len(one) < len(seconds) for one in found):
            continue
        every.setdefault(paces.workload(cell), []).extend(found)
        if len(found) >= _SEEDS:
            lines.append(_line(cell, found))
    pooled = {name: of for name, of in every.items() if len(of) >= _SEEDS}
    lines += [_line(f"all of {name}", of) for name, of in pooled.items()]
    return "\n".join(lines) if len(lines) > 2 else ""


def _line(name: str, found: Sequence[Sequence[float]]) -> str:
    """Of runs, each with a value for each of the seconds."""
    shown = " | ".join(lateness.summary(of) for of in zip(*found, strict=True))
    return f"| {name} | {shown} | {len(found)} |"


def _less_late(
    own: lateness.Points, other: lateness.Points, ideal: lateness.Points, at: float, *, less: bool
) -> float | None:
    mine, theirs = (lateness.lateness(one, ideal, at, less=less) for one in (own, other))
    return None if mine is None or theirs is None else theirs - mine


def _points(run: Result) -> list[tuple[float, float]]:
    return [(point.seconds, point.metric) for point in run.points]


def late_at(
    runs: Curves, method: str, seconds: float, *, less: bool = False, beside: str = "ideal"
) -> float | None:
    """The mean over the seeds that ``beside`` has, too; None if one never arrived."""
    found = latenesses(runs, method, seconds, less=less, beside=beside)
    known = [one for one in found if one is not None]
    return statistics.fmean(known) if known and len(known) == len(found) else None


def latenesses(
    runs: Curves, method: str, seconds: float, *, less: bool = False, beside: str = "ideal"
) -> list[float | None]:
    """Of each seed that ``beside`` has, too; None: it never arrived."""
    return [
        lateness.lateness(points, runs["ideal"][seed], seconds, less=less)
        for seed, points in runs[method].items()
        if seed in runs["ideal"] and seed in runs[beside]
    ]


def at_last(cells: Cells, method: str) -> dict[str, tuple[float, float]]:
    """Cell → mean lateness at the last of its seconds, and half of the 95 % interval.

    The half is 0 with fewer than three seeds; cells in which a run never arrives are left out.
    """
    found = {}
    for cell, (runs, less) in cells.items():
        if method not in runs:
            continue
        of = latenesses(runs, method, seconds_of(runs)[-1], less=less)
        seeds = [one for one in of if one is not None]
        if seeds and len(seeds) == len(of):
            mean = statistics.fmean(seeds)
            half = interval_of(seeds).high - mean if len(seeds) >= _SEEDS else 0.0
            found[cell] = mean, half
    return found


def sooner(runs: Curves, rival: str, name: str, seconds: float, *, less: bool) -> bool:
    """Whether the rival is ahead after so many seconds, on average over the seeds of both."""
    own = late_at(runs, name, seconds, less=less, beside=rival)
    other = late_at(runs, rival, seconds, less=less, beside=name)
    return other is not None and (own is None or other < own)
