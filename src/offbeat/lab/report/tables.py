"""Tables, made from results only."""

import statistics
from collections.abc import Sequence

from offbeat.baselines import FedAvg
from offbeat.display.table import Table
from offbeat.lab.report.clock import took_turns
from offbeat.lab.report.intervals import interval_of
from offbeat.lab.report.rows import Row, common_options, ideal_of, rows_of, share_of_ideal
from offbeat.lab.results import Result
from offbeat.registry import parse_strategy
from offbeat.strategies.base import Gradients, SharedModel
from offbeat.units import show_bandwidth, show_bytes, show_seconds

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
"""The heading that stands behind the speed-up where ``ideal`` was run, too."""
SHARE_MEANS = (
    "Share of the ideal is the time to target of ideal, which has the samples of bsp at the step "
    "time of a worker that trains alone beside the others, divided by that of the row."
)
TUNED = ("lr x", "runs")
"""The headings behind the strategy where a grid of learning rates was tried."""
TUNED_MEANS = (
    "Each method was tried with several factors on its learning rate (lr x); the row is the one "
    "with the best mean of the final metric, over these very runs. "
    "Runs are all that this took. Edge: the best was the smallest or largest that was tried."
)
CLOCK_MEANS = (
    "Seconds are told on one clock, for runs that trained alone by turns: as if a step alone had "
    "taken throughout what it took in the run of ideal with the same seed, or without one the mean "
    "over all turns with that seed."
)
SHARES = (0.95, 0.98, 0.995)
"""Of the ideal's final metric: targets that no method has a part in."""


def without_lssr(result: Result) -> bool:
    """Whether LSSR is undefined: the workers do not synchronize in the same steps.

    For peers, and for custom strategies that cannot be imported any more, it is unknown.
    """
    try:
        strategy = parse_strategy(result.strategy)
    except (ValueError, TypeError):
        return False
    averages = strategy.averages()
    if isinstance(averages, SharedModel):
        return averages.eager
    return not isinstance(averages, Gradients) and not isinstance(strategy, FedAvg)


def spread(values: Sequence[float | None], form: str, ranges: bool, unit: str = "") -> str:
    """The median, and with several values the range; "-" if they are not known."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return "-"
    text = format(statistics.median(known), form)
    if ranges and len(known) > 1:
        text += f" ({format(min(known), form)}-{format(max(known), form)})"
    return text + unit


def table(results: Sequence[Result], *, ranges: bool = True) -> Table:
    """One row a method; medians over seeds, with their range, and "-" for what is not known.

    Speed-up is against the first row that is not the ideal. Where the ideal was run, the share of
    it stands behind; see ``SHARE_MEANS``. Where learning rates were tried, the best one and what it
    took stand in front; see ``TUNED_MEANS``.
    """
    rows = rows_of(results)
    first = next((row.arrival for row in rows if not row.is_ideal), None)
    with_ideal, with_tuned = has_ideal(results), is_tuned(results)
    cells: list[tuple[str, ...]] = []
    for row in rows:
        runs, reached = row.runs, row.arrival
        times = spread([run.time_to_target_seconds for run in runs], ".1f", ranges, " s")
        cells.append(
            (
                row.name,
                *(_tuned(row) if with_tuned else ()),
                _not_all(runs) if reached is None else times,
                f"{first / reached:.2f}x" if first and reached else "-",
                *([percent(share_of_ideal(row, rows))] if with_ideal else []),
                spread([run.final for run in runs], ".4f", ranges),
                spread([run.seconds for run in runs], ".1f", ranges, " s"),
                "-" if without_lssr(runs[0]) else spread([r.lssr for r in runs], ".2f", ranges),
                _sent(runs),
                spread([_hundredfold(run.idle) for run in runs], ".0f", ranges, " %"),
            )
        )
    headings = (*HEADINGS[:3], SHARE, *HEADINGS[3:]) if with_ideal else HEADINGS
    if with_tuned:
        headings = (headings[0], *TUNED, *headings[1:])
    return Table(headings, tuple(cells), caption(results))


def _not_all(runs: Sequence[Result]) -> str:
    """How many of the runs arrived, where not all did."""
    arrived = sum(run.time_to_target_seconds is not None for run in runs)
    return f"not reached, {arrived} of {len(runs)}" if arrived else "not reached"


def _tuned(row: Row) -> tuple[str, str]:
    chosen = "-" if row.lr_scale is None else f"{row.lr_scale:g}{' (edge)' * row.at_edge}"
    return chosen, str(row.tried)


def has_ideal(results: Sequence[Result]) -> bool:
    """Whether the ideal was run, so that there are shares of it."""
    return any(result.is_ideal for result in results)


def is_tuned(results: Sequence[Result]) -> bool:
    """Whether methods were tried with several learning rates."""
    return any(len(result.lr_scales) > 1 for result in results)


def notes(results: Sequence[Result]) -> list[str]:
    """What is to be said below the table of these results."""
    said = [TUNED_MEANS] * is_tuned(results) + [SHARE_MEANS] * has_ideal(results)
    return said + [CLOCK_MEANS] * took_turns(results)


def percent(share: float | None) -> str:
    """As in ``87 %``; "-" if it is not known."""
    return "-" if share is None else f"{100 * share:.0f} %"


def _sent(runs: Sequence[Result]) -> str:
    known = [run.payload_bytes for run in runs if run.payload_bytes is not None]
    return show_bytes(statistics.median(known)) if known else "-"


def _hundredfold(share: float | None) -> float | None:
    return None if share is None else 100 * share


def targets_of(ideal: Row) -> dict[float, float]:
    """For each of ``SHARES`` the metric that is so near to the ideal's at its end, the median's.

    The share itself of a metric of which more is better, else that metric over the share.
    """
    final = statistics.median(run.final for run in ideal.runs)
    up = ideal.runs[0].higher_is_better
    return {share: share * final if up else final / share for share in SHARES}


def seconds_to(result: Result, target: float) -> float | None:
    """Training seconds of the first evaluation at ``target`` or better; None without one."""
    sign = 1 if result.higher_is_better else -1
    arrived = (p.seconds for p in result.points if sign * p.metric >= sign * target)
    return next(arrived, None)


def arrivals(results: Sequence[Result], *, ranges: bool = True) -> Table | None:
    """How long each method took to each of ``SHARES`` of the ideal's final metric.

    Behind the time, in brackets, is the share of the ideal: its time over that of the row. None
    where the ideal was not run.
    """
    rows = rows_of(results)
    ideal = ideal_of(rows)
    if ideal is None:
        return None
    targets = targets_of(ideal)
    cells = []
    for row in rows:
        times = [
            _arrived(row, ideal, target, ranges=ranges and len(row.runs) > 1)
            for target in targets.values()
        ]
        cells.append((row.name, *times))
    headings = [f"{100 * share:g}%: {target:.4g}" for share, target in targets.items()]
    text = (
        f"Seconds to shares of the ideal's final {results[0].metric}; in brackets the ideal's "
        "seconds over the row's"
    )
    return Table(("strategy", *headings), tuple(cells), text)


def _arrived(row: Row, ideal: Row, target: float, *, ranges: bool) -> str:
    times = [seconds_to(run, target) for run in row.runs]
    known = [one for one in times if one is not None]
    if not known:
        return "never"
    if len(known) < len(times):
        return f"{len(known)} of {len(times)} runs, {min(known):.1f} s at best"
    best = [one for run in ideal.runs if (one := seconds_to(run, target)) is not None]
    middle = statistics.median(known)
    share = statistics.median(best) / middle if best and middle else None
    return f"{spread(known, '.1f', ranges, ' s')} [{percent(share)}]"


def differences(results: Sequence[Result]) -> Table | None:
    """Each method against the ideal, or else the first row, seed by seed.

    Mean and 95 % interval of the paired differences, by Student's t. None with fewer than two
    seeds, or rows, in common.
    """
    rows = rows_of(results)
    base = ideal_of(rows) or rows[0]
    cells = []
    for row in rows:
        pairs = _pairs(row, base)
        if row is base or len(pairs) < 2:
            continue
        cells.append(
            (
                row.name,
                percent(share_of_ideal(row, rows)),
                str(len(pairs)),
                _difference([one.final - other.final for one, other in pairs], "+.4f"),
                _difference([one.seconds - other.seconds for one, other in pairs], "+.1f", " s"),
            )
        )
    if not cells:
        return None
    text = f"Differences from {base.name} with the same seed: mean [95 % interval by Student's t]"
    return Table(("strategy", SHARE, "seeds", "final", "training time"), tuple(cells), text)


def _pairs(row: Row, base: Row) -> list[tuple[Result, Result]]:
    others = {run.job.seed: run for run in base.runs}
    return [(run, others[run.job.seed]) for run in row.runs if run.job.seed in others]


def _difference(values: Sequence[float], form: str, unit: str = "") -> str:
    found = interval_of(values)
    return f"{found.mean:{form}} [{found.low:{form}}, {found.high:{form}}]{unit}"


def links(results: Sequence[Result]) -> Table | None:
    """What was measured of the links, before each method and after it; None if nothing was."""
    cells = []
    rows = rows_of(results)
    for row in rows:
        told = [run.links for run in row.runs if len(run.links) == 2]
        if not told:
            continue
        speeds, waits = (
            [statistics.median(getattr(of[i], name) for of in told) for i in range(2)]
            for name in ("bytes_per_second", "latency_seconds")
        )
        share = [percent(share_of_ideal(row, rows))] if has_ideal(results) else []
        cells.append(
            (
                row.name,
                *share,
                *(show_bandwidth(float(f"{8 * speed:.3g}")) for speed in speeds),
                *(show_seconds(wait, digits=3) for wait in waits),
            )
        )
    if not cells:
        return None
    share = [SHARE] if has_ideal(results) else []
    names = ("before", "after", "latency before", "latency after")
    text = "Links as measured within the runs, all busy at once, the slowest; medians over seeds"
    return Table(("strategy", *share, *names), tuple(cells), text)


def further(results: Sequence[Result]) -> list[tuple[str, str]]:
    """Strategy and final value of each metric besides the target's; medians over seeds."""
    told = []
    for row in rows_of(results):
        values = [
            f"{name} {spread([run.final_metrics[name] for run in row.runs], '.4f', True)}"
            for name in row.runs[0].final_metrics
            if name != row.runs[0].metric
        ]
        if values:
            told.append((row.name, ", ".join(values)))
    return told


def caption(results: Sequence[Result]) -> str:
    """What was compared: recipe, target, workers, link, machine, options; simulated or real."""
    one = results[0]
    most = len({run.job.seed for run in results})
    least = min(len({run.job.seed for run in row.runs}) for row in rows_of(results))
    seeds = f"{most} seed{'s' if most > 1 else ''}"
    seeds = seeds if least == most else f"{least} to {seeds}"
    kind = "simulated" if one.simulated else "real processes"
    uneven = f", steps varying by {100 * one.job.jitter:g} %" if one.job.jitter else ""
    uneven += f", {_slow(one.job.slow)}" if one.job.slow else ""
    return (
        f"{one.job.recipe}, target {one.metric} {one.target:g}, {one.job.workers} workers "
        f"({kind}), {one.link}{uneven}, {one.machine}, {seeds}"
        f"{''.join(f', {option}' for option in common_options(results))}"
    )


def _slow(text: str) -> str:
    pairs = (part.partition("=") for part in text.split(","))
    return ", ".join(f"worker {rank} {factor} times slower" for rank, _, factor in pairs)


def markdown(results: Sequence[Result]) -> str:
    """The tables as Markdown, with their captions and notes; and further metrics."""
    more = [f"- `{strategy}`: {values}" for strategy, values in further(results)]
    below = "\nAt the end:\n\n" + "\n".join(more) + "\n" if more else ""
    below_table = "".join(f"\n{note}\n" for note in notes(results))
    others = (arrivals(results), differences(results))
    extra = "".join(f"\n{one.markdown()}" for one in others if one is not None)
    return table(results).markdown() + below_table + extra + below
