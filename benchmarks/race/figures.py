"""The figures of the race, from its results only: virtual time, real processes, and both together.

``python -m benchmarks evidence`` draws them, and rewrites the pages that quote the results.
"""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import RESULTS
from benchmarks.race.curves import Cells, Curves, final_slowdowns, mean_slowdown, seconds_of
from benchmarks.race.curves import curves as real_curves
from benchmarks.race.methods import DILOCO, is_default, short_name
from benchmarks.race.plots import (
    DPI,
    FONT,
    MARKERS,
    WIDTH,
    canvas,
    draw_factor,
    draw_profile,
    draw_shares,
    legend_below,
    wrapped,
)
from benchmarks.race.settings import CELLS
from benchmarks.race.simulated_results import (
    CellTimes,
    against_best_rival,
    times_of,
    tuning_runs,
)
from benchmarks.race.simulated_settings import (
    BANDWIDTHS,
    FACTORS,
    LATENCIES,
    MAP,
    METHODS,
    SHARE,
    TUNED_AT,
    Cell,
)
from benchmarks.run_cache import Row
from offbeat.display.plots import new_figure
from offbeat.lab.report.figures import PARTS, time_split
from offbeat.lab.report.rows import rows_of
from offbeat.lab.results import read_results

REAL = {"cifar-lan": "1Gbit/s", "cifar-office": "200Mbit/s", "cifar-wan": "50Mbit/s"}
"""Cells on real processes → the bandwidth of the same cell in virtual time, at 0.1 ms."""
AT = (10.0, 15.0)
"""Seconds of the ideal network at which both are compared."""


def draw(rows: Sequence[Row], folder: Path = RESULTS) -> list[Path]:
    """Draw all figures for which there are results; return their paths."""
    paths = []
    if rows:
        cells = times_of(rows, "mlp", "defaults")
        drawings = {
            "map": lambda path: draw_map(rows, path, "defaults"),
            "map-tuned": lambda path: draw_map(rows, path, "tuned"),
            "share": lambda path: draw_shares_by_latency(cells, path),
            "profile": lambda path: draw_profile(
                [with_short_names(one) for one in cells.values()], path, SHARE
            ),
            "rates": lambda path: draw_rates(rows, path),
            "bytes": lambda path: draw_bytes(rows, path),
            "curves": lambda path: draw_curves(rows, path),
        }
        for name, drawing in drawings.items():
            if name == "map-tuned" and len(against_best_rival(rows, "tuned")) < len(BANDWIDTHS):
                continue  # too few cells for a map
            if name == "rates" and not tuning_runs(rows):
                continue
            paths.append(folder / f"race-simulated-{name}.png")
            drawing(paths[-1])
    if (folder / "race-defaults-cifar-wan.jsonl").exists():
        paths.append(folder / "race-defaults-time.png")
        draw_time_split(folder / "race-defaults-cifar-wan.jsonl", paths[-1])
    found = cells_in_order(folder)
    if found:
        paths.append(folder / "race-defaults-late.png")
        draw_slowdowns(found, paths[-1])
    pairs = simulated_and_real(folder)
    if pairs:
        paths.append(folder / "race-simulated-reality.png")
        draw_reality(pairs, paths[-1])
    return paths


def draw_shares_by_latency(cells: dict[Cell, CellTimes], path: Path) -> None:
    """Draw the shares on the map: solid lines for the least latency, dotted for the longest."""
    first, *others = (
        [
            with_short_names(one)
            for cell, one in cells.items()
            if cell in MAP and cell.latency == latency
        ]
        for latency in (LATENCIES[0], *reversed(LATENCIES[1:]))
    )
    draw_shares(first, path, *others)


def with_short_names(one: CellTimes) -> CellTimes:
    """Return the times with the methods' short names."""
    times = {short_name(method): seconds for method, seconds in one.times.items()}
    return CellTimes(one.cell, times, one.merge_over_step)


def draw_map(rows: Sequence[Row], path: Path, track: str) -> None:
    """Draw, over bandwidth and latency, the default's time over the best rival's."""
    figure, axes = new_figure(WIDTH, 2.6, dpi=DPI)
    fair = against_best_rival(rows, track, track)
    for cell, (ratio, name) in against_best_rival(rows, track).items():
        x, y = BANDWIDTHS.index(cell.bandwidth), LATENCIES.index(cell.latency)
        name = short_name(name).partition(":")[0].partition(" (")[0]
        if ratio:
            also = f"\n({fair[cell][0]:.2f})" if track == "tuned" else ""
            draw_factor(axes, x, y, ratio, FONT, f"{also}\n{name}")
        else:
            axes.text(x, y, "no rival\narrives", ha="center", va="center", fontsize=FONT)
    axes.set_xlim(-0.5, len(BANDWIDTHS) - 0.5)
    axes.set_ylim(-0.5, len(LATENCIES) - 0.5)
    axes.set_xticks(range(len(BANDWIDTHS)), BANDWIDTHS, fontsize=FONT)
    axes.set_yticks(range(len(LATENCIES)), [f"{one:g} ms" for one in LATENCIES], fontsize=FONT)
    axes.set_ylabel("latency, one way", fontsize=FONT)
    whose = "tuned rival" if track == "tuned" else "rival, as it comes"
    title = f"streaming, only its rate set, against the best {whose}:\ntimes its time (simulated)"
    title += "; in brackets: tuned, too" if track == "tuned" else ""
    axes.set_title(title, fontsize=FONT, loc="left")
    figure.savefig(path)


def draw_rates(rows: Sequence[Row], path: Path) -> None:
    """Draw the final metric against the factor on the learning rate, for one seed."""
    found: dict[str, dict[float, float]] = {}
    for row in rows:
        setting, _, scale = row["method"].partition(" --lr-scale ")
        tuning = (row["workload"], row["track"], row["cell"]) == ("mlp", "tuning", TUNED_AT)
        if tuning and setting in METHODS:
            found.setdefault(setting, {})[float(scale or 1)] = 100 * row["points"][-1][1]
    names = [one for one in METHODS if one in found]
    figure, axes = canvas(3.2, legend=len(names))
    for number, method in enumerate(names):
        scales = sorted(found[method])
        finals = [found[method][one] for one in scales]
        style = f"{MARKERS[number]}-"
        axes.plot(scales, finals, style, color=f"C{number}", label=short_name(method), markersize=5)
    axes.set_xscale("log")
    axes.set_xticks(FACTORS, [f"{one:g}" for one in FACTORS])
    axes.minorticks_off()
    axes.set_xlabel("times the recipe's learning rate")
    axes.set_ylim(60)  # below, a run has diverged
    axes.set_ylabel("final accuracy, % (simulated)")
    legend_below(figure, axes)
    figure.savefig(path)


def draw_bytes(rows: Sequence[Row], path: Path) -> None:
    """Draw the final metric against the bytes of a worker, a mark a cell of the map; medians."""
    found: dict[str, dict[Cell, list[Row]]] = {}
    for row in rows:
        kind = row["workload"], row["track"], row["cell"] in MAP
        if kind == ("mlp", "defaults", True) and row["family"] != "ideal":
            found.setdefault(row["family"], {}).setdefault(row["cell"], []).append(row)
    figure, axes = canvas(3.2, legend=len(found))
    for number, (method, cells) in enumerate(found.items()):
        megabytes = [
            statistics.median(r["payload_bytes"] for r in of) / 1e6 for of in cells.values()
        ]
        finals = [100 * statistics.median(r["points"][-1][1] for r in of) for of in cells.values()]
        axes.plot(
            *(megabytes, finals, MARKERS[number]),
            color=f"C{number + 1}",
            label=short_name(method),
            markersize=5,
            alpha=0.7,
        )
    axes.set_xscale("log")
    axes.set_xlabel("MB that a worker hands to the network")
    axes.set_ylabel("final accuracy, % (simulated)")
    legend_below(figure, axes)
    figure.savefig(path)


def draw_curves(rows: Sequence[Row], path: Path, cell: Cell = TUNED_AT) -> None:
    """Draw the metric against seconds in one cell: medians over the seeds, and their range."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if (row["workload"], row["track"], row["cell"]) == ("mlp", "defaults", cell):
            found.setdefault(row["family"], []).append(row)
    figure, axes = canvas(3.2, legend=len(found))
    for number, (method, of) in enumerate(found.items()):
        columns = [*zip(*(row["points"] for row in of), strict=True)]
        seconds = [statistics.median(point[0] for point in column) for column in columns]
        metrics = [[100 * point[1] for point in column] for column in columns]
        colour = f"C{number}"
        axes.plot(
            *(seconds, [*map(statistics.median, metrics)]), color=colour, label=short_name(method)
        )
        axes.fill_between(
            seconds,
            [*map(min, metrics)],
            [*map(max, metrics)],
            color=colour,
            alpha=0.2,
            linewidth=0,
        )
    most = max(row["points"][-1][0] for row in found["ideal"])
    axes.set_xlim(0, 3 * most)
    axes.set_ylim(50)
    axes.set_xlabel(f"training seconds (simulated), {cell.name}")
    axes.set_ylabel("accuracy, %")
    legend_below(figure, axes)
    figure.savefig(path)


def draw_time_split(results: Path, path: Path) -> None:
    """Draw how the time of each method divides into computing, waiting and the rest."""
    rows = rows_of(read_results(results))
    figure, axes = canvas(0.9 + 0.4 * len(rows), legend=len(PARTS))
    split = [time_split(row, rows) for row in rows]
    left = [0.0] * len(rows)
    for part, colour in zip(PARTS, ("C0", "C1", "C3", "C7"), strict=True):
        values = [100 * one.get(part, 0.0) for one in split]
        if any(values):
            axes.barh(range(len(rows)), values, left=left, color=colour, height=0.6, label=part)
            left = [a + b for a, b in zip(left, values, strict=True)]
    axes.set_yticks(
        range(len(rows)), [wrapped(short_name(row.name).partition(" (")[0], 22) for row in rows]
    )
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, 100)
    cell = results.stem.split("-", 2)[2]
    axes.set_xlabel(f"% of the time, {cell}")
    legend_below(figure, axes, 2)
    figure.savefig(path)


def cells_in_order(folder: Path) -> Cells:
    """Return the cells with seconds to show, in the order of the grid."""
    found = {cell: one for cell, one in real_curves(folder).items() if seconds_of(one[0])}
    known = [one.name for one in CELLS if one.name in found]
    return {cell: found[cell] for cell in dict.fromkeys([*known, *found])}


def draw_slowdowns(cells: Cells, path: Path) -> None:
    """Draw the slowdown after the last of the seconds, with 95 % intervals."""
    order = list(cells)
    methods = list(dict.fromkeys(name for cell in order for name in cells[cell][0]))
    methods = [one for one in methods if one != "ideal"]
    figure, axes = canvas(0.9 + 0.2 * len(order), legend=len(methods))
    for number, method in enumerate(methods):
        main = is_default(method) or method == DILOCO
        drawn = {
            "color": f"C{number % 10}" if main else str(0.25 + 0.55 * number / len(methods)),
            "markersize": 6 if main else 4,
            "linestyle": "none",
            "zorder": 3 if main else 2,
        }
        found = final_slowdowns(cells, method)
        axes.errorbar(
            [one.mean for one in found.values()],
            [order.index(cell) for cell in found],
            xerr=[
                [max(0.0, one.mean - one.low) for one in found.values()],
                [max(0.0, one.high - one.mean) for one in found.values()],
            ],
            fmt=MARKERS[number % len(MARKERS)],
            label=short_name(method),
            **drawn,
        )
    axes.axvline(1, color="0.5", linewidth=1, linestyle=":")
    axes.set_xscale("log")
    ticks = [0.7, 1, 1.5, 2, 3, 5, 10]
    axes.set_xticks(ticks, [f"{one:g}" for one in ticks])
    axes.minorticks_off()
    axes.set_yticks(range(len(order)), order)
    axes.set_ylim(len(order) - 0.5, -0.5)
    axes.set_xlabel("times the ideal's time, real processes")
    legend_below(figure, axes)
    figure.savefig(path)


Pair = tuple[str, str, float, float | None, float | None]
"""Cell, method, seconds of the ideal network, slowdown in virtual time, and on real processes."""


def simulated_and_real(folder: Path = RESULTS) -> list[Pair]:
    """Return the mean slowdowns of the methods that were run in virtual time and on real processes.

    The simulated runs are those of the ablation with four workers.
    """
    path, measured = folder / "ablation.jsonl", real_curves(folder)
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    found: list[Pair] = []
    for real, bandwidth in REAL.items():
        virtual: Curves = {}
        for row in rows:
            one = row["cell"]
            here = one["bandwidth"] == bandwidth or one["method"] == "ideal"
            if (one["task"], one["workers"]) == ("cnn", 4) and here:
                points = [(point["seconds"], point["metric"]) for point in row["points"]]
                virtual.setdefault(one["method"], {})[one["seed"]] = points
        if "ideal" in virtual and real in measured:
            other = measured[real][0]
            found += [
                (
                    real,
                    method,
                    at,
                    mean_slowdown(virtual, method, at),
                    mean_slowdown(other, method, at),
                )
                for method in virtual
                if method != "ideal" and method in other
                for at in AT
            ]
    return found


def draw_reality(pairs: Sequence[Pair], path: Path) -> None:
    """Draw the slowdown on real processes against the one in virtual time."""
    known = [one for one in pairs if one[3] is not None and one[4] is not None]
    names = [*dict.fromkeys((cell, method) for cell, method, *_ in known)]
    figure, axes = canvas(3.2, legend=len(names))
    for number, (cell, method) in enumerate(names):
        own = [one for one in known if one[:2] == (cell, method)]
        label = f"{short_name(method).partition(' (')[0]}, {REAL[cell]}"
        colour = "C0" if is_default(method) else "C1"
        axes.plot(
            *([one[3] for one in own], [one[4] for one in own], MARKERS[number]),
            color=colour,
            label=label,
        )
    ends = [value for one in known for value in one[3:] if value is not None]
    low, high = min([*ends, 1.0]) - 0.05, max([*ends, 1.0]) + 0.05
    axes.plot([low, high], [low, high], ":", color="0.5", linewidth=1)
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    axes.set_xlabel("times as late as the ideal, simulated")
    axes.set_ylabel("on real processes")
    legend_below(figure, axes, 2)
    figure.savefig(path)
