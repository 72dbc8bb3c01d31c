"""Results of the race on real processes, and the slowdowns that follow from them.

The times of old results are converted to one machine speed; see ``earlier_clock``.
"""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.race import earlier_clock
from benchmarks.race.earlier_clock import on_one_clock
from benchmarks.race.slowdown import slowdown
from offbeat.lab.report.intervals import MIN_SEEDS, Interval, interval_of
from offbeat.lab.report.rows import rows_of
from offbeat.lab.results import Result

SECONDS = (10.0, 20.0, 30.0)
"""Seconds of the ideal network after which slowdowns are shown."""
EARLY_SECONDS = (2.0, 4.0, 6.0)
"""The same for cells whose ideal network ends before those."""
Curves = dict[str, dict[int, list[tuple[float, float]]]]
"""Method → seed → seconds and metric of each evaluation, for the seeds of the ideal network."""
Cells = Mapping[str, tuple[Curves, bool]]
"""Name of a cell → its curves, and True if a lower metric is better."""


def read(folder: Path, track: str, *, steady: bool = False) -> dict[str, list[Result]]:
    """Return the results of every cell of a track that has an ideal network, by the cell's name.

    Args:
        folder: Directory of the results.
        track: Track to read.
        steady: True to use one step time for all runs of the ideal network of a workload, their
            mean. This suits methods that did not measure the machine's speed. Cells with uneven
            workers are left out.
    """
    found = {}
    for path in sorted(folder.glob(f"race-{track}-*.jsonl")):
        results = earlier_clock.read(path)
        if any(one.is_ideal for one in results) and "tiny" not in path.stem:
            found[path.stem.split("-", 2)[2]] = results
    if steady:
        found = {cell: runs for cell, runs in found.items() if not _uneven(runs[0])}
    steps: dict[str, list[float]] = {}
    for cell, runs in found.items():
        own = [one.mean_step_seconds for one in runs if one.is_ideal]
        steps.setdefault(workload_of(cell), []).extend(own)
    return {
        cell: on_one_clock(runs, statistics.fmean(steps[workload_of(cell)]) if steady else None)
        for cell, runs in found.items()
    }


def workload_of(cell: str) -> str:
    """Return the workload's name, the first word of the cell's."""
    return cell.partition("-")[0]


def _uneven(run: Result) -> bool:
    return run.job.slow is not None or run.job.jitter > 0


def curves(folder: Path, track: str = "defaults") -> dict[str, tuple[Curves, bool]]:
    """Return the curves of every cell of a track; see ``Cells``."""
    return {
        cell: (curves_of(results), not results[0].higher_is_better)
        for cell, results in read(folder, track).items()
    }


def curves_of(results: Sequence[Result]) -> Curves:
    """Return the curves of one cell."""
    seeds = {one.job.seed for one in results if one.is_ideal}
    return {
        row.name: {
            run.job.seed: [(point.seconds, point.metric) for point in run.points]
            for run in row.runs
            if run.job.seed in seeds
        }
        for row in rows_of(results)
    }


def covers(runs: Curves, seconds: Sequence[float]) -> bool:
    """True if the ideal network has a metric at all of these seconds, under each seed."""
    return all(
        points[0][0] <= min(seconds) and max(seconds) <= points[-1][0]
        for points in runs["ideal"].values()
    )


def seconds_of(runs: Curves) -> Sequence[float]:
    """Return the seconds to show for a cell; none if its ideal network covers neither choice."""
    return next((few for few in (SECONDS, EARLY_SECONDS) if covers(runs, few)), ())


def slowdowns(
    runs: Curves, method: str, seconds: float, *, less: bool = False, paired_with: str = "ideal"
) -> list[float | None]:
    """Return the slowdown under each seed that ``paired_with`` has; None if never reached."""
    return [
        slowdown(points, runs["ideal"][seed], seconds, lower_is_better=less)
        for seed, points in runs[method].items()
        if seed in runs["ideal"] and seed in runs[paired_with]
    ]


def mean_slowdown(
    runs: Curves, method: str, seconds: float, *, less: bool = False, paired_with: str = "ideal"
) -> float | None:
    """Return the mean of ``slowdowns``; None if a run never arrived."""
    found = slowdowns(runs, method, seconds, less=less, paired_with=paired_with)
    known = [one for one in found if one is not None]
    return statistics.fmean(known) if known and len(known) == len(found) else None


def final_slowdowns(cells: Cells, method: str) -> dict[str, Interval]:
    """Return, by cell, the mean slowdown after the last of its seconds, and its interval.

    The interval is empty with fewer than three seeds. Cells in which a run never arrives are left
    out.
    """
    found = {}
    for cell, (runs, less) in cells.items():
        if method not in runs:
            continue
        values = slowdowns(runs, method, seconds_of(runs)[-1], less=less)
        known = [one for one in values if one is not None]
        if known and len(known) == len(values):
            mean = statistics.fmean(known)
            alone = Interval(mean, mean, mean)
            found[cell] = interval_of(known) if len(known) >= MIN_SEEDS else alone
    return found
