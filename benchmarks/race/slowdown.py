"""The slowdown of a run against the ideal network.

The *ideal* is the reference ``ideal``, the speed-up limit. The slowdown to a metric is the run's
time until it has this metric, divided by the ideal's time.
"""

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise

from offbeat_lab.methods.registry import is_ideal
from offbeat_lab.report.intervals import MIN_SEEDS, interval_of
from offbeat_lab.results import Result
from offbeat_lab.tuning import reference

Runs = dict[int, Result]
"""Results of one method by seed."""


def slowdown_half_way(run: Result, ideal: Result) -> float | None:
    """Return the slowdown to what the ideal has after half of its time; None if never reached."""
    best = _after(ideal, ideal.seconds / 2)
    return _slowdown(run, ideal, best if ideal.higher_is_better else -best)


def _after(run: Result, seconds: float) -> float:
    """Return the best metric so far after some seconds, negated if lower is better.

    Raises:
        ValueError: The run has no evaluations around that time.
    """
    for (start, low), (end, high) in pairwise(run.best_so_far()):
        if start <= seconds <= end:
            return low + (high - low) * (seconds - start) / (end - start)
    raise ValueError(f"no metric after {seconds:g} s")


def slowdown_to_share(run: Result, ideal: Result, share: float) -> float | None:
    """Return the slowdown to a share of the ideal's improvement; None if never reached."""
    return _slowdown(run, ideal, ideal.gained(share))


def _slowdown(run: Result, ideal: Result, metric: float) -> float | None:
    arrived, reached = run.seconds_to(metric), ideal.seconds_to(metric)
    return None if arrived is None or reached is None else arrived / reached


def pairs(runs: Runs, ideal: Runs) -> list[tuple[Result, Result]]:
    """Return each run with the ideal's run of the same seed, in order of the seeds."""
    return [(runs[seed], ideal[seed]) for seed in sorted(runs.keys() & ideal.keys())]


def slowdowns(runs: Runs, ideal: Runs, share: float) -> list[float | None]:
    """Return the slowdown to a share of the ideal's improvement for each seed.

    None stands for a run that never reaches it.
    """
    return [slowdown_to_share(run, best, share) for run, best in pairs(runs, ideal)]


def lateness(runs: Runs, ideal: Runs, share: float) -> tuple[int, float, float]:
    """Return a rank of runs: the smaller, the better.

    It counts the runs that never reach the share. Next counts the mean slowdown of the others,
    and then the mean of the final metric.
    """
    times = slowdowns(runs, ideal, share)
    known = [one for one in times if one is not None]
    ends = [run.final if run.higher_is_better else -run.final for run in runs.values()]
    mean = statistics.fmean(known) if known else math.inf
    return len(times) - len(known), mean, -statistics.fmean(ends)


def fastest(results: Sequence[Result], share: float, seeds: int) -> dict[str, Runs]:
    """Return the runs of each tuned method with the settings that are first to a share.

    Tuning decides with one seed which settings run with all seeds. Of these, the best ones by
    ``lateness`` count. The ideal has those of its best trial.

    Args:
        results: Trials and runs.
        share: Share of the ideal's improvement.
        seeds: Number of seeds that a setting must have to count.
    """
    trials = [one for one in results if one.trial is not None]
    runs: dict[str, Runs] = {}
    for one in results:
        if one.trial is None:
            runs.setdefault(one.label, {})[one.job.seed] = one
    tried: dict[str, dict[str, None]] = {}
    for one in trials:
        assert one.trial is not None
        tried.setdefault(one.trial.method, {})[one.label] = None
    best = reference(trials).label
    found: dict[str, Runs] = {}
    for method, labels in tried.items():
        chosen = [best] if is_ideal(method.split()[0]) else labels
        complete = [runs[label] for label in chosen if len(runs.get(label, {})) == seeds]
        if complete:
            found[method] = min(complete, key=lambda own: lateness(own, runs[best], share))
    return found


def summary(values: Sequence[float | None]) -> str:
    """Return slowdowns as text; None stands for a run that never arrives.

    If all runs arrive: the mean, with the 95 % interval in brackets from three values on, or with
    both of two values. Otherwise the number of runs that arrive, and the best one.
    """
    known = [one for one in values if one is not None]
    if not known:
        return "never"
    if len(known) < len(values):
        return f"{len(known)} of {len(values)}, {min(known):.2f} at best"
    text = f"{statistics.fmean(known):.2f}"
    if len(known) >= MIN_SEEDS:
        interval = interval_of(known)
        return f"{text} [{interval.low:.2f}, {interval.high:.2f}]"
    return f"{text} ({min(known):.2f} and {max(known):.2f})" if len(known) == 2 else text
