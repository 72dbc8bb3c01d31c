"""Tables of the comparisons in ``studies``, for the page that quotes them.

The *ideal* is the reference ``ideal``. Slowdowns and differences compare each run with the ideal's
run of the same seed.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.harness import RESULTS
from benchmarks.race.slowdown import (
    Runs,
    fastest,
    lateness,
    pairs,
    slowdown_half_way,
    slowdowns,
    summary,
)
from benchmarks.race.studies import (
    CELLS,
    CORRECTED,
    DEFAULT,
    DILOCO,
    EAGER,
    ELASTIC_RATE,
    FAST,
    FEATURES,
    FRESH,
    GOOD,
    HEADLINE,
    RATES,
    REAL,
    SWEEP,
    SWEEP_RATES,
    UNCORRECTED,
    UNEVEN,
    VARIANTS,
    Cell,
    at_rate,
)
from offbeat.units import to_bandwidth
from offbeat_lab.job import Job
from offbeat_lab.report.intervals import MIN_SEEDS, Interval, interval_of
from offbeat_lab.results import Result, by_seed, read_results
from offbeat_lab.timing.padding import parse_slow
from offbeat_lab.tuning import choices, untried_neighbours

TRAININGS = {"transformer": "Transformer, AdamW", "cnn": "CNN, SGD"}
DDP = "bsp --wire float32"
NAMES = {
    "ideal": "ideal",
    "streaming": "streaming",
    DILOCO: "DiLoCo",
    "local": "local SGD",
    "async": "async",
    "selsync": "SelSync",
    "bsp": "BSP",
    DDP: "DDP",
    "sparseloco": "SparseLoCo",
    "powersgd": "PowerSGD",
    EAGER: "async, eager",
}
"""Method as in ``studies`` → its name in tables and figures."""
BY_DEFAULT = "streaming, default"


def cells_of(study: str, workload: str, folder: Path = RESULTS) -> list[Cell]:
    """Return the cells of a study and a workload that are complete.

    In a complete cell, each method has all seeds, with all settings that tuning chose.
    """
    return [
        cell
        for cell in CELLS
        if (cell.study, cell.workload) == (study, workload) and _is_complete(cell, folder)
    ]


def _is_complete(cell: Cell, folder: Path) -> bool:
    try:
        found = [runs_of(cell, folder, share) for share in (FAST, GOOD)]
    except FileNotFoundError:  # of the cell itself, or of that which chose its settings
        return False
    methods, results = cell.methods(folder), read_results(cell.path(folder), trials=True)
    trials = [one for one in results if one.trial is not None]
    chosen = [one for share in (FAST, GOOD) for one in choices(trials, share)] if trials else []
    return all(
        len(runs) == cell.seeds
        for runs in (
            *(by_share.get(one, {}) for by_share in found for one in methods),
            *(by_seed(results, one.job.label) for one in chosen),
        )
    )


def runs_of(cell: Cell, folder: Path = RESULTS, share: float = FAST) -> dict[str, Runs]:
    """Return the runs of each method of a cell. Tuned settings are those first to ``share``."""
    results = read_results(cell.path(folder), trials=True)
    if cell.trials is None:
        return _of_labels(results, {one: Job("").under(one).label for one in cell.methods(folder)})
    found = fastest(results, share, cell.seeds)
    return {one: found[one] for one in cell.methods(folder) if one in found}


def default_runs(cell: Cell, folder: Path = RESULTS) -> Runs:
    """Return the runs with the default settings, at the rate at which the ideal ends best."""
    (ideal, *_) = runs_of(cell, folder)["ideal"].values()
    label = Job("").under(at_rate(DEFAULT, ideal.job.lr_scale)).label
    return by_seed(read_results(cell.path(folder)), label)


def _of_labels(results: Sequence[Result], labels: dict[str, str]) -> dict[str, Runs]:
    """Return each method's runs without trials. ``labels`` maps methods to labels."""
    found = {method: by_seed(results, label) for method, label in labels.items()}
    return {method: runs for method, runs in found.items() if runs}


def half_way(runs: Runs, ideal: Runs) -> list[float | None]:
    """Return the slowdown to the ideal's metric after half of its time, for each seed."""
    return [slowdown_half_way(run, best) for run, best in pairs(runs, ideal)]


def differences(runs: Runs, ideal: Runs) -> list[float]:
    """Return the final metric minus the ideal's for each seed. Accuracies are in points."""
    return [
        (run.final - best.final) * (100 if best.higher_is_better else 1)
        for run, best in pairs(runs, ideal)
    ]


def difference_at_end(runs: Runs, ideal: Runs) -> str:
    """Return the mean of ``differences``, with an interval from three seeds on."""
    values = differences(runs, ideal)
    digits = 1 if next(iter(ideal.values())).higher_is_better else 3
    if len(values) < MIN_SEEDS:
        return f"{statistics.fmean(values):+.{digits}f}"
    return _interval(interval_of(values), digits)


def end(runs: Runs) -> str:
    """Return the mean final metric."""
    result = next(iter(runs.values()))
    mean = statistics.fmean(run.final for run in runs.values())
    return f"{100 * mean:.1f} %" if result.higher_is_better else f"{mean:.3f}"


# -- the tables of the page ------------------------------------------------------------------------


def expectations(folder: Path = RESULTS) -> str:
    """Return the table of ``headline``: the default settings, the best other method when tuned.

    Times are slowdowns to 90 %.
    """
    lines = _heading(
        *("training, link", "first to 90 %", "default settings", "end − ideal"),
        *("best other method, tuned", "its time", "its end − ideal", "DDP"),
    )
    for workload, name in TRAININGS.items():
        for cell in cells_of("headline", workload, folder):
            tuned = runs_of(cell, folder)
            ideal, default = tuned["ideal"], default_runs(cell, folder)
            others = [one for one in tuned if one not in ("ideal", "streaming")]
            best = min(others, key=lambda one: lateness(tuned[one], ideal, FAST))
            shown = [_verdict(default, {one: tuned[one] for one in others}, best, ideal)]
            shown += _time_and_end(default, ideal)
            shown += [f"`{_settings(tuned[best])}`", *_time_and_end(tuned[best], ideal)]
            shown.append(summary(slowdowns(tuned[DDP], ideal, FAST)))
            lines.append(f"| {name}, {cell.link} | {' | '.join(shown)} |")
    return "\n".join(lines)


def _verdict(default: Runs, others: Mapping[str, Runs], best: str, ideal: Runs) -> str:
    """Return who gains 90 % first: the best other method if its interval is below 0.

    Otherwise return all methods whose interval contains 0, or "default". The intervals are of the
    slowdown of a method minus the default's, paired by seed. If runs of the default or of the best
    other method never arrive, they are counted instead.
    """
    gaps = {one: _gap(default, runs, ideal) for one, runs in others.items()}
    gap, name = gaps[best], NAMES[best]
    if gap is None:
        late, other = (slowdowns(runs, ideal, FAST).count(None) for runs in (default, others[best]))
        first = f"{name}; " if late > other else "default; " if late < other else ""
        return f"{first}{late} default and {other} {name} of {len(default)} runs never arrive"
    if gap.high < 0:
        return f"{name}: {_interval(gap, 2)}"
    level = [NAMES[one] for one, gap in gaps.items() if gap and gap.low <= 0 <= gap.high]
    first = f"level with {', '.join(level)}" if level else "default"
    return f"{first}; {name} {_interval(gap, 2)}"


def _gap(default: Runs, other: Runs, ideal: Runs) -> Interval | None:
    """Return the paired difference of two methods' slowdowns to 90 %; None if a run never does."""
    times = slowdowns(default, ideal, FAST), slowdowns(other, ideal, FAST)
    gaps = [late - early for early, late in zip(*times, strict=True) if early and late]
    return interval_of(gaps) if len(gaps) == len(times[0]) else None


def _settings(runs: Runs) -> str:
    return next(iter(runs.values())).label.replace(",fragments=4,overlap=4", "")


def _time_and_end(runs: Runs, ideal: Runs) -> list[str]:
    return [summary(slowdowns(runs, ideal, FAST)), difference_at_end(runs, ideal)]


def links(workload: str, folder: Path = RESULTS) -> str:
    """Return the time to 90 % and the difference at the end: methods of ``headline`` × links."""
    cells = cells_of("headline", workload, folder)
    found = {cell.link: runs_of(cell, folder) for cell in cells}
    return _methods({link: _named(runs) for link, runs in found.items()})


def _named(runs: Mapping[str, Runs]) -> dict[str, Runs]:
    return {NAMES[method]: one for method, one in runs.items()}


def _methods(columns: Mapping[str, Mapping[str, Runs]]) -> str:
    """Return a table with a row for each method. A column has its name and the methods' runs."""
    lines = _heading("method", *columns)
    for method in next(iter(columns.values()), {}):
        cells = [
            end(found[method])
            if method == "ideal"
            else "; ".join(_time_and_end(found[method], found["ideal"]))
            for found in columns.values()
        ]
        lines.append(f"| {' | '.join([method, *cells])} |")
    return "\n".join(lines)


def tuned(workload: str, folder: Path = RESULTS) -> str:
    """Return the table of all methods of ``headline``, with all settings that tuning chose.

    *first to* has the shares that they reach first among the method's settings. A star means that
    not all neighbours of these settings were tried.
    """
    lines = _heading(
        *("link", "method", "settings", "first to", "half-way", "90 %", "98 %"),
        *("end", "end − ideal"),
    )
    for cell in cells_of("headline", workload, folder):
        trials = [one for one in read_results(cell.path(folder), trials=True) if one.trial]
        fast, good = (runs_of(cell, folder, share) for share in (FAST, GOOD))
        for method, runs in fast.items():
            own = [one for one in trials if one.trial and one.trial.method == method]
            shown = {"90 %": runs, "98 %": good[method]}
            if runs == good[method]:
                shown = {"90 %, 98 %": runs}
            for shares, which in shown.items():
                missing = untried_neighbours(method, next(iter(which.values())), own)
                settings = f"`{_settings(which)}`{'*' * bool(missing)} | {shares}"
                same = fast["ideal"] if method == "ideal" else which
                lines.append(_row(cell.link, NAMES[method], settings, same, fast["ideal"]))
    return "\n".join(lines)


def elsewhere(folder: Path = RESULTS) -> str:
    """Return the table of ``elsewhere``.

    Methods have their settings that are faster to 90 %, and the ideal those that end better.
    """
    columns = {}
    for workload, name in TRAININGS.items():
        for cell in cells_of("elsewhere", workload, folder):
            found, labels = runs_of(cell, folder), cell.methods(folder)
            names = [*(NAMES[method] for method in HEADLINE), BY_DEFAULT]
            where = "uneven links" if cell.uneven_links else f"{cell.workers} workers"
            ideal = best_of([found[label] for label in labels[:: len(names)]])

            def late(runs: Runs, ideal: Runs = ideal) -> tuple[int, float, float]:
                return lateness(runs, ideal, FAST)

            columns[f"{name}, {where}"] = {
                each: min((found[label] for label in labels[place :: len(names)]), key=late)
                for place, each in enumerate(names)
            } | {"ideal": ideal}
    return _methods(columns)


def fresh(folder: Path = RESULTS) -> str:
    """Return the table of ``fresh``: methods × trainings and links."""
    columns = {}
    for workload, name in TRAININGS.items():
        for cell in cells_of("fresh", workload, folder):
            default, ideal, *others = runs_of(cell, folder).values()
            names = ["ideal", BY_DEFAULT, *(NAMES[method] for method in FRESH[1:])]
            columns[f"{name}, {cell.link}"] = dict(
                zip(names, (ideal, default, *others), strict=True)
            )
    return _methods(columns)


def ten(folder: Path = RESULTS) -> str:
    """Return the table of ``headline`` and ``fresh`` together.

    The column of the default compares it with the ideal. The others have a method minus the
    default: the paired differences of the time to 90 %, divided by the ideal's, and of the end.
    """
    names = [NAMES[method] for method in FRESH[1:]]
    lines = _heading("training, link", "default", *(f"{name} − default" for name in names))
    for workload, training in TRAININGS.items():
        for cell in cells_of("fresh", workload, folder):
            before = read_results(replace(cell, study="headline").path(folder))
            pooled = [
                runs | by_seed(before, next(iter(runs.values())).label)
                for runs in runs_of(cell, folder).values()
            ]
            default, ideal, *others = pooled
            shown = ["; ".join(_time_and_end(default, ideal))]
            for other in others:
                gap = _gap(default, other, ideal)
                time = "not all arrive" if gap is None else _interval(gap, 2)
                shown.append(f"{time}; {difference_at_end(other, default)}")
            lines.append(f"| {training}, {cell.link} | {' | '.join(shown)} |")
    return "\n".join(lines)


def _interval(one: Interval, digits: int) -> str:
    return f"{one.mean:+.{digits}f} [{one.low:+.{digits}f}, {one.high:+.{digits}f}]"


def real(folder: Path = RESULTS) -> str:
    """Return the table of the chosen settings on real processes, with two columns for each link.

    *a step* is the mean duration of a step divided by the ideal's.
    """
    names = [*(NAMES[method] for method in REAL), BY_DEFAULT]
    rows: dict[str, list[str]] = {name: [] for name in names}
    columns = []
    for workload, training in TRAININGS.items():
        for cell in cells_of("real", workload, folder):
            found = dict(zip(names, runs_of(cell, folder).values(), strict=False))
            found.setdefault(BY_DEFAULT, found["streaming"])  # the chosen settings are the default
            columns += [f"{training}, {cell.link}", "a step"]
            for name, runs in found.items():
                together = pairs(runs, found["ideal"])
                steps = [run.mean_step_seconds / best.mean_step_seconds for run, best in together]
                time, difference = _time_and_end(runs, found["ideal"])
                shown = end(runs) if name == "ideal" else f"{time}; {difference}"
                rows[name] += [shown, summary(steps)]
    lines = [f"| {' | '.join([name, *cells])} |" for name, cells in rows.items()]
    return "\n".join([*_heading("method", *columns), *lines] if columns else [])


def steps_to_send(cell: Cell, runs: Runs) -> float:
    """Return S, the time to send the model of ``runs`` once in float32, in steps."""
    model_bits = 8 * (next(iter(runs.values())).model_bytes or math.nan)
    return model_bits / to_bandwidth(cell.bandwidth) / cell.task.step_seconds


def sweeps(folder: Path = RESULTS) -> dict[tuple[str, int], list[tuple[float, Runs, Runs]]]:
    """Return S, the default's runs and the ideal's on each link of ``sweep``.

    The keys are workloads and numbers of workers.
    """
    found: dict[tuple[str, int], list[tuple[float, Runs, Runs]]] = {}
    for workload, workers in SWEEP_RATES:
        cells = [one for one in cells_of("sweep", workload, folder) if one.workers == workers]
        if not cells or cells[0].bandwidth != SWEEP[0]:
            continue
        ideal, _ = runs_of(cells[0], folder).values()
        rows = []
        for cell in cells:
            *_, streaming = runs_of(cell, folder).values()
            rows.append((steps_to_send(cell, streaming), streaming, ideal))
        found[workload, workers] = rows
    return found


def sweep(folder: Path = RESULTS) -> str:
    """Return the table of the default settings on links from fast to slow."""
    lines = _heading("training", "workers", "S", "half-way", "90 %", "98 %", "end", "end − ideal")
    for (workload, workers), rows in sweeps(folder).items():
        for steps, streaming, ideal in rows:
            first = f"{TRAININGS[workload]} | {workers}"
            lines.append(_row(first, f"{steps:.1f}", None, streaming, ideal))
    return "\n".join(lines)


def adam(folder: Path = RESULTS) -> str:
    """Return the table of strategies with and without longer steps of Adam.

    All columns are differences of the final metric between runs of the same seed.
    """
    lines = _heading(
        "strategy", "as it is − ideal", "longer steps − ideal", "longer steps − as it is"
    )
    for cell in cells_of("adam", "transformer", folder):
        found = runs_of(cell, folder)
        ideal = found["ideal"]
        for method in CORRECTED:
            longer, plain = found[method], found[method + UNCORRECTED]
            compared = ((plain, ideal), (longer, ideal), (longer, plain))
            shown = (difference_at_end(one, other) for one, other in compared)
            lines.append(f"| `{method}` | {' | '.join(shown)} |")
    return "\n".join(lines)


def rates(workload: str, folder: Path = RESULTS) -> str:
    """Return the table of methods at several learning rates: final metric minus the ideal's.

    The ideal is that at its best rate, the one with the best mean. There is one row for each number
    of workers and each method, with one column for each rate.
    """
    cells = cells_of("rates", workload, folder)
    columns = sorted({rate for cell in cells for rate in RATES[workload, cell.workers]})
    lines = _heading("workers", "method", *(f"× {rate:g}" for rate in columns))
    for cell in cells:
        found = runs_of(cell, folder)
        factors = RATES[workload, cell.workers]
        grid = {
            method: {rate: found[at_rate(method, rate)] for rate in factors}
            for method in VARIANTS[workload, cell.workers]
        }
        ideal = best_of([*grid["ideal"].values()])
        for method, row in grid.items():
            shown = [_against(row.get(rate), ideal) for rate in columns]
            lines.append(f"| {cell.workers} | `{method}` | {' | '.join(shown)} |")
    return "\n".join(lines)


def many(folder: Path = RESULTS) -> str:
    """Return the table of many workers.

    *pass* is the number of local steps in which the whole model is averaged once.
    """
    lines = _heading("workers", "link", "method", "a step", "pass", "90 %", "end", "end − ideal")
    for cell in cells_of("many", "mnist", folder):
        found, nodes = runs_of(cell, folder), cell.workers // cell.workers_per_node
        grouped = "" if cell.workers_per_node == 1 else f" in {nodes} nodes"
        ideal = best_of([runs for label, runs in found.items() if label.startswith("ideal")])
        for label, runs in found.items():
            if runs is not ideal and label.startswith("ideal"):
                continue
            step = statistics.fmean(run.mean_step_seconds for run in runs.values())
            steps = statistics.fmean(_pass_steps(run) for run in runs.values())
            shown = [f"{cell.workers}{grouped}", cell.bandwidth, f"`{label}`"]
            shown += [f"{1000 * step:.1f} ms", f"{steps:.1f}"]
            shown += [summary(slowdowns(runs, ideal, FAST)), end(runs)]
            shown.append("" if runs is ideal else difference_at_end(runs, ideal))
            lines.append(f"| {' | '.join(shown)} |")
    return "\n".join(lines)


def _pass_steps(run: Result) -> float:
    """Return the number of local steps in a pass. Results of the earlier rate control have it."""
    details = run.details
    if "pass_steps" in details or not details.get("landings"):
        return float(details.get("pass_steps", 1))
    return float(run.points[-1].step * details["parts"] / details["landings"])


def _against(runs: Runs | None, ideal: Runs) -> str:
    """Return the final metric of the ideal itself, or the difference to it of other runs."""
    if runs is None:
        return ""
    return end(runs) if runs is ideal else difference_at_end(runs, ideal)


def features(folder: Path = RESULTS) -> str:
    """Return the table of trainings with one feature each: final metric minus the ideal's."""
    lines = _heading("training", "ideal", "streaming, 90 %", "streaming − ideal")
    for workload in FEATURES:
        for cell in cells_of("features", workload, folder):
            ideal, streaming = runs_of(cell, folder).values()
            shown = [end(ideal), *_time_and_end(streaming, ideal)]
            lines.append(f"| {workload.replace('_', ' ')} | {' | '.join(shown)} |")
    return "\n".join(lines)


def uneven(folder: Path = RESULTS) -> str:
    """Return the table of workers of unequal speed, with two columns for each set of speeds."""
    cells = cells_of("uneven", "mlp", folder)
    if not cells:
        return ""
    by_cell = [runs_of(cell, folder) for cell in cells]
    names = []
    for cell in cells:
        slow = parse_slow(cell.slow, cell.workers)
        names.append(", ".join(f"{1 / slow.get(rank, 1):.2g}" for rank in range(cell.workers)))
    lines = _heading("method", *(f"{one}: {of}" for one in names for of in ("90 %", "end − ideal")))
    rows = {NAMES[method]: [found[method] for found in by_cell] for method in UNEVEN}
    default = [default_runs(cell, folder) for cell in cells]
    for name, row in ({"streaming, default settings": default} | rows).items():
        shown = []
        for runs, found in zip(row, by_cell, strict=True):
            ideal = found["ideal"]
            time, difference = _time_and_end(runs, ideal)
            shown += [time, end(runs) if runs is ideal else difference]
        lines.append(f"| {name} | {' | '.join(shown)} |")
    return "\n".join(lines)


def elastic(folder: Path = RESULTS) -> str:
    """Return the table of runs in which a worker dies and another one joins.

    *whole run* is the duration of a run divided by the ideal's.
    """
    lines = _heading("workers", "method", "whole run", "90 %", "end − ideal")
    for study, name in (("elastic", "virtual time"), ("elastic_real", "real processes")):
        for cell in cells_of(study, "mlp", folder):
            found = runs_of(cell, folder)
            ideal = next(runs for method, runs in found.items() if method.startswith("ideal"))
            for method, runs in found.items():
                label = method.removesuffix(f" --lr-scale {ELASTIC_RATE}")
                lines.append(f"| {name} {_whole_run(label, runs, ideal)}")
    return "\n".join(lines)


def skewed(folder: Path = RESULTS) -> str:
    """Return the table of trainings whose workers have different labels."""
    lines = _heading("method", "whole run", "90 %", "end − ideal")
    for cell in cells_of("skewed", "cnn", folder):
        found = runs_of(cell, folder)
        lines += [_whole_run(method, runs, found["ideal"]) for method, runs in found.items()]
    return "\n".join(lines)


def _whole_run(method: str, runs: Runs, ideal: Runs) -> str:
    whole = summary([run.seconds / best.seconds for run, best in pairs(runs, ideal)])
    time, difference = _time_and_end(runs, ideal)
    shown = [f"`{method}`", whole, time, end(runs) if runs is ideal else difference]
    return f"| {' | '.join(shown)} |"


def best_of(runs: Sequence[Runs]) -> Runs:
    """Return the runs with the best mean of the final metric."""
    sign = 1 if next(iter(runs[0].values())).higher_is_better else -1
    return max(runs, key=lambda one: sign * statistics.fmean(run.final for run in one.values()))


def _heading(*names: str) -> list[str]:
    return [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]


def _row(first: str, method: str, settings: str | None, runs: Runs, ideal: Runs) -> str:
    shown = [first, method, *([] if settings is None else [settings])]
    shown.append(summary(half_way(runs, ideal)))
    shown += [summary(slowdowns(runs, ideal, share)) for share in (FAST, GOOD)]
    shown.append(end(runs))
    shown.append("" if runs is ideal else difference_at_end(runs, ideal))
    return f"| {' | '.join(shown)} |"
