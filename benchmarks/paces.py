"""On what clock the runs of the race are compared: the machine's speed moves while they run.

The ideal's step is what workers alone take; on a machine that others use it moves by a third within
a quarter of an hour, and a method's step with it. A run that trained alone by turns
(``offbeat.lab.step_time``) knows how fast the machine was meanwhile: its seconds are told as on a
machine on which the ideal's step stayed what it was in the ideal's own run
(``offbeat.lab.report.clock``).
"""

import statistics
from pathlib import Path

from offbeat.lab.report.clock import on_one_clock, step_of
from offbeat.lab.results import Result, read_results


def read(folder: Path, track: str, *, steady: bool = False) -> dict[str, list[Result]]:
    """The results of every cell of a track that have an ideal, by the cell's name.

    Args:
        folder: Of the results.
        track: Which runs.
        steady: One step for all runs of the ideal of a workload, the mean of theirs; for methods
            that took no turns it varies what they are measured against less. Cells whose workers
            are uneven are left out.
    """
    found = {}
    for path in sorted(folder.glob(f"race-{track}-*.jsonl")):
        results = read_results(path)
        if any(one.is_ideal for one in results) and "tiny" not in path.stem:
            found[path.stem.split("-", 2)[2]] = results
    if steady:
        found = {cell: runs for cell, runs in found.items() if not _uneven(runs[0])}
    steps: dict[str, list[float]] = {}
    for cell, runs in found.items():
        steps.setdefault(workload(cell), []).extend(step_of(one) for one in runs if one.is_ideal)
    return {
        cell: on_one_clock(runs, statistics.fmean(steps[workload(cell)]) if steady else None)
        for cell, runs in found.items()
    }


def workload(cell: str) -> str:
    """What a cell trains, of its name."""
    return cell.partition("-")[0]


def _uneven(run: Result) -> bool:
    return run.job.slow is not None or run.job.jitter > 0
