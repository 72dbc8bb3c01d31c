"""The secondary tables of a comparison of methods: targets, differences and tuning.

The *ideal* is the reference ``ideal``: BSP timed without communication, the speed-up limit.
"""

import math
import statistics
from collections.abc import Sequence

from offbeat.extend import Table
from offbeat_lab.report.intervals import MIN_SEEDS, interval_of
from offbeat_lab.report.rows import (
    DIVERGED,
    Row,
    failures_in,
    ideal_of,
    rows_of,
    share_of_ideal,
    targets_of,
)
from offbeat_lab.report.tables import SHARE, percent, spread
from offbeat_lab.results import Result
from offbeat_lab.tuning import SHARES, choices, without_trials


def other_tables(results: Sequence[Result], *, ranges: bool = True) -> dict[str, Table]:
    """Return the tables besides the main one by title. ``results`` include trials."""
    runs = without_trials(results)
    found = {
        "Tuning": tuning(results),
        "Time to shares of the ideal": times_to_targets(runs, ranges=ranges),
        "Differences, seed by seed": differences(runs),
    }
    return {title: table for title, table in found.items() if table is not None}


def times_to_targets(results: Sequence[Result], *, ranges: bool = True) -> Table | None:
    """Return a table of the seconds in which each method reaches three common targets.

    A target is a share, such as 95 %, of the ideal's final metric. A cell has the method's median
    seconds and, with ``ranges``, their range over the seeds. In brackets it has the ideal's median
    divided by the method's. If only some runs reached the target, the cell has their number and the
    best time. If none did, it is "never".

    Returns:
        The table. None if the comparison has no run of the ideal, or one that diverged, or if the
        ideal's final metric is not positive, such as a log-likelihood.
    """
    rows = rows_of(results)
    ideal = ideal_of(rows)
    if ideal is None or DIVERGED in failures_in(ideal.runs):
        return None
    targets = targets_of(ideal)
    if not targets:
        return None
    cells = [
        (row.name, *(_time_to(row, ideal, target, ranges=ranges) for target in targets.values()))
        for row in rows
    ]
    headings = [f"{100 * share:g}%: {target:.4g}" for share, target in targets.items()]
    caption = (
        f"Seconds until a method reaches shares of the ideal's final {results[0].metric}; in "
        "brackets the ideal's seconds divided by the method's"
    )
    return Table(("strategy", *headings), tuple(cells), caption)


def _time_to(row: Row, ideal: Row, target: float, *, ranges: bool) -> str:
    times = [run.seconds_to(target) for run in row.runs]
    reached = [seconds for seconds in times if seconds is not None]
    if not reached:
        return "never"
    if len(reached) < len(times):
        return f"{len(reached)} of {len(times)} runs, {min(reached):.1f} s at best"
    best = [s for run in ideal.runs if (s := run.seconds_to(target)) is not None]
    middle = statistics.median(reached)
    share = statistics.median(best) / middle if best and middle else None
    return f"{spread(reached, '.1f', ranges, ' s')} [{percent(share)}]"


def differences(results: Sequence[Result]) -> Table | None:
    """Return a table of the differences between each method and a reference.

    The reference is the ideal or, if the ideal was not run, the first method. Runs with the same
    seed are compared. The table has the share of the ideal, the number of seeds, and the mean
    difference in the final metric and in the training time, each with its 95 % interval if there
    are at least three seeds. Methods that share fewer than two seeds with the reference are left
    out.

    Returns:
        The table, or None if no method remains.
    """
    rows = rows_of(results)
    base = ideal_of(rows) or rows[0]
    base_runs = {run.job.seed: run for run in base.runs}
    cells = []
    for row in rows:
        pairs = [(run, base_runs[run.job.seed]) for run in row.runs if run.job.seed in base_runs]
        if row is base or len(pairs) < 2:
            continue
        cells.append(
            (
                row.name,
                percent(share_of_ideal(row, rows)),
                str(len(pairs)),
                _difference([_gain(run, other) for run, other in pairs], "+.4f"),
                _difference([run.seconds - other.seconds for run, other in pairs], "+.1f", " s"),
            )
        )
    if not cells:
        return None
    caption = (
        f"Differences from {base.name} with the same seed: mean [95 % interval over the "
        f"seeds, if there are at least {MIN_SEEDS}]"
    )
    return Table(("strategy", SHARE, "seeds", "final", "training time"), tuple(cells), caption)


def _gain(run: Result, other: Result) -> float:
    """Return the difference of the final metrics, or NaN if a run diverged."""
    return math.nan if run.diverged or other.diverged else run.final - other.final


def _difference(values: Sequence[float], form: str, unit: str = "") -> str:
    lost = sum(not math.isfinite(value) for value in values)
    if lost:
        return (
            f"nan ({DIVERGED})"
            if lost == len(values)
            else f"nan ({lost} of {len(values)} {DIVERGED})"
        )
    if len(values) < MIN_SEEDS:
        return f"{statistics.fmean(values):{form}}{unit}"
    interval = interval_of(values)
    return f"{interval.mean:{form}} [{interval.low:{form}}, {interval.high:{form}}]{unit}"


def tuning(results: Sequence[Result]) -> Table | None:
    """Return a table of the settings that tuning chose for each method.

    Returns:
        The table, or None if ``results`` has no trials.
    """
    trial = next((result.trial for result in results if result.trial is not None), None)
    if trial is None:
        return None
    cells = []
    for both in zip(*(choices(results, share) for share in sorted(SHARES)), strict=True):
        for label in dict.fromkeys(one.job.label for one in both):
            chosen = [one for one in both if one.job.label == label]
            first = ", ".join(
                f"{one.share:.0%} ({'never' if one.seconds is None else f'{one.seconds:.1f} s'})"
                for one in chosen
            )
            untried = ", ".join(chosen[0].untried)
            ended = f"budget ended before: {untried}" if untried else "complete"
            end = f"{chosen[0].final:.4g}"
            cells.append((chosen[0].method, label, str(chosen[0].trials), first, end, ended))
    seed = next(result.job.seed for result in results if result.trial is not None)
    caption = (
        f"Settings chosen with at most {trial.budget} trials per method and the seed {seed}, which "
        "is not in the other tables: the first to reach a share of what the best trial of the "
        "ideal gains. A search is complete if all neighbouring values were tried"
    )
    headings = ("strategy", "chosen", "trials", "first to", "final", "search")
    return Table(headings, tuple(cells), caption)
