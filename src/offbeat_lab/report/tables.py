"""The main table of a comparison, its caption and its notes.

The *ideal* is the reference ``ideal``: BSP timed without communication. *LSSR* is the share of
steps without synchronization. The *target* is a value of the metric, set by the recipe.
"""

import math
import statistics
from collections.abc import Sequence

from offbeat import Strategy
from offbeat.extend import GlobalModel, Gradients, Table, show_bytes, show_seconds
from offbeat_lab.baselines import FedAvg, PowerSGD, SparseLoCo
from offbeat_lab.methods.registry import parse_imported
from offbeat_lab.report.rows import (
    FAILURES,
    common_options,
    failure_of,
    failures_in,
    rows_of,
    share_of_ideal,
)
from offbeat_lab.results import Result
from offbeat_lab.scenario import Scenario

HEADINGS = (
    "strategy",
    "time to target",
    "speed-up",
    "final",
    "training time",
    "LSSR",
    "sent per worker",
    "idle",
)
SHARE = "share of the ideal"
"""Additional heading, after the speed-up, in a comparison with the ideal."""
SHARE_MEANS = (
    "Share of the ideal is the time to target of ideal divided by that of the row. The method "
    "ideal trains like bsp, but its time is the number of steps times the step time of workers "
    "that train without communication."
)
NOT_TRAINED = "Runs that did not train"
"""Start of the note that explains the marks of such runs."""
_SHOWN_LATE = 0.01  # smallest share of late steps that has a note


def table(results: Sequence[Result], *, ranges: bool = True) -> Table:
    """Return the main table: one row per method, medians over seeds, "-" for unknown values.

    The speed-up is relative to the first row that is not the ideal. With ``ranges``, the table also
    shows the ranges over the seeds.
    """
    rows = rows_of(results)
    base = next((row.seconds_to_target for row in rows if not row.is_ideal), None)
    with_ideal = has_ideal(results)
    cells: list[tuple[str, ...]] = []
    for row in rows:
        runs, seconds = row.runs, row.seconds_to_target
        times = spread([run.time_to_target_seconds for run in runs], ".1f", ranges, " s")
        idle = [None if run.idle is None else 100 * run.idle for run in runs]
        lssr = [run.lssr for run in runs] if _has_lssr(runs[0]) else [None]
        cells.append(
            (
                row.name,
                _not_reached(runs) if seconds is None else times,
                f"{base / seconds:.2f}x" if base and seconds else "-",
                *([percent(share_of_ideal(row, rows))] if with_ideal else []),
                _final(runs, ranges),
                spread([run.seconds for run in runs], ".1f", ranges, " s"),
                spread(lssr, ".2f", ranges),
                "-" if row.is_ideal else _sent(runs),
                spread(idle, ".0f", ranges, " %"),
            )
        )
    headings = (*HEADINGS[:3], SHARE, *HEADINGS[3:]) if with_ideal else HEADINGS
    return Table(headings, tuple(cells), caption(results))


def spread(values: Sequence[float | None], form: str, ranges: bool, unit: str = "") -> str:
    """Return a cell with the median and, with ``ranges``, the range of ``values`` over the seeds.

    The cell is "-" if a value is unknown, and "nan" if one is NaN. ``form`` is the format of a
    number, such as ".2f".
    """
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return "-"
    if any(map(math.isnan, known)):
        return "nan"
    text = format(statistics.median(known), form)
    if ranges and len(known) > 1:
        text += f" ({format(min(known), form)}-{format(max(known), form)})"
    return text + unit


def percent(share: float | None) -> str:
    """Return a share as text such as ``87 %``, or "-" if it is None."""
    return "-" if share is None else f"{100 * share:.0f} %"


def _has_lssr(result: Result) -> bool:
    """Return True if all workers synchronize in the same steps, so that LSSR has a meaning.

    Also returns True for peers, and for custom strategies that are not imported here.
    """
    method = parse_imported(result.strategy)
    if not isinstance(method, Strategy):
        return True
    averages = method.averages()
    if isinstance(averages, GlobalModel):
        return not averages.eager
    return isinstance(averages, Gradients) or isinstance(method, FedAvg | SparseLoCo | PowerSGD)


def _not_reached(runs: Sequence[Result]) -> str:
    """Return the cell of a row in which some runs did not reach the target."""
    reached = sum(run.time_to_target_seconds is not None for run in runs)
    return f"not reached, {reached} of {len(runs)}" if reached else "not reached"


def _final(runs: Sequence[Result], ranges: bool) -> str:
    """Return the cell of the final metric. NaN and infinity count as the worst value."""
    worst = -math.inf if runs[0].higher_is_better else math.inf
    finals = [run.final if math.isfinite(run.final) else worst for run in runs]
    shown = "nan" if any(math.isnan(run.final) for run in runs) else "inf"
    text = spread(finals, ".4f", ranges).replace(f"{worst}", shown)
    failures = failures_in(runs)
    return f"{text} ({failures})" if failures else text


def _sent(runs: Sequence[Result]) -> str:
    known = [run.payload_bytes for run in runs if run.payload_bytes is not None]
    return show_bytes(statistics.median(known)) if known else "-"


def winner(results: Sequence[Result]) -> str:
    """Return a sentence that says which method reached the target first; the ideal is left out."""
    rows = [row for row in rows_of(results) if not row.is_ideal]
    target = f"{results[0].metric} {results[0].target:g}"
    times = sorted((row.seconds_to_target, row.name) for row in rows if row.seconds_to_target)
    if not times:
        return f"No method reached {target} with every seed."
    text = f"{times[0][1]} reached {target} first, in {times[0][0]:.1f} s"
    if len(times) > 1:
        text += f"; the last was {times[-1][1]}, in {times[-1][0]:.1f} s"
    if never := [row.name for row in rows if not row.seconds_to_target]:
        text += f"; {', '.join(never)} did not reach it with every seed"
    several = len({result.job.seed for result in results}) > 1
    return f"{text} ({'medians' if several else 'one seed'})."


def has_ideal(results: Sequence[Result]) -> bool:
    """Return True if the ideal was run."""
    return any(result.is_ideal for result in results)


def notes(results: Sequence[Result]) -> list[str]:
    """Return the explanations that belong below the main table."""
    late = [
        f"{row.name} {100 * share:.0f} %"
        for row in rows_of(results)
        if (share := statistics.fmean(run.late_share for run in row.runs)) > _SHOWN_LATE
    ]
    failed = {failure_of(run) for row in rows_of(results) for run in row.runs}
    meanings = [f"{mark} ({meaning})" for mark, meaning in FAILURES.items() if mark in failed]
    return (
        [f"{NOT_TRAINED}: {', '.join(meanings)}. Try a smaller --lr-scale."] * bool(meanings)
        + [SHARE_MEANS] * has_ideal(results)
        + [f"Steps that took longer to compute than --step-time: {', '.join(late)}."] * bool(late)
    )


def other_metrics(results: Sequence[Result]) -> list[tuple[str, str]]:
    """Return (name of the row, text) with the final values of metrics other than the main one.

    Rows without other metrics are left out.
    """
    lines = []
    for row in rows_of(results):
        values = [
            f"{name} {spread([run.final_metrics[name] for run in row.runs], '.4f', True)}"
            for name in row.runs[0].final_metrics
            if name != row.runs[0].metric
        ]
        if values:
            lines.append((row.name, ", ".join(values)))
    return lines


def caption(results: Sequence[Result]) -> str:
    """Return a caption: recipe, target, workers, network, step times, machine, seeds, options."""
    first = results[0]
    job = first.job
    most = len({run.job.seed for run in results})
    least = min(len({run.job.seed for run in row.runs}) for row in rows_of(results))
    seeds = f"{most} seed{'s' if most > 1 else ''}"
    seeds = seeds if least == most else f"{least} to {seeds}"
    kind = "simulated" if first.simulated else "real processes"
    uneven = f", steps varying by {100 * job.jitter:g} %" if job.jitter else ""
    for part in job.slow.split(",") if job.slow else []:
        rank, _, factor = part.partition("=")
        uneven += f", worker {rank} {factor} times slower"
    if events := len(Scenario.from_json(job.scenario).events):
        uneven += f", scenario of {events} event{'s' if events > 1 else ''}"
    if job.step_seconds is not None:
        uneven = f", steps padded to {show_seconds(job.step_seconds)}{uneven}"
    return (
        f"{job.recipe}, target {first.metric} {first.target:g}, {job.workers} workers "
        f"({kind}), {first.link}{uneven}, {first.machine}, {seeds}"
        f"{''.join(f', {option}' for option in common_options(results))}"
    )
