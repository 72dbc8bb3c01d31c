"""Pictures of the race, from its results only: of the simulated half, and of both side by side.

``python -m benchmarks evidence`` draws them, and rewrites what the pages say of them.
"""

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks import race
from benchmarks.harness import RESULTS
from benchmarks.race_figures import (
    DPI,
    FONT,
    MARKERS,
    WIDTH,
    Raced,
    canvas,
    draw_profile,
    draw_shares,
    legend_below,
    show_factor,
    wrapped,
)
from benchmarks.race_late import Cells, Curves, at_last, late_at, seconds_of
from benchmarks.race_late import curves as real_curves
from benchmarks.race_names import OURS, is_default, short
from benchmarks.race_simulated import (
    BANDWIDTHS,
    FACTORS,
    LATENCIES,
    MAP,
    METHODS,
    SHARE,
    TUNED_AT,
    Cell,
    raced,
    tried,
)
from benchmarks.virtual import Row
from offbeat.display.plots import new_figure
from offbeat.lab.report.figures import PARTS, time_split
from offbeat.lab.report.rows import rows_of
from offbeat.lab.results import read_results

IMAGES = RESULTS.parents[1] / "docs" / "images"
REAL = {"cifar-lan": "1Gbit/s", "cifar-office": "200Mbit/s", "cifar-wan": "50Mbit/s"}
"""Cells of the race on real processes that have a simulated one: its bandwidth, at 0.1 ms."""
AT = (10.0, 15.0)
"""Seconds of the ideal at which both are compared."""


def draw(rows: Sequence[Row], folder: Path = RESULTS) -> list[Path]:
    """All pictures for which there are results."""
    paths = []
    if rows:
        cells = raced(rows, "mlp", "defaults")
        told = {
            "map": lambda path: regret_map(rows, path, "defaults"),
            "map-tuned": lambda path: regret_map(rows, path, "tuned"),
            "share": lambda path: shares(cells, path),
            "profile": lambda path: draw_profile(
                [named(one) for one in cells.values()], path, SHARE
            ),
            "rates": lambda path: rates(rows, path),
            "bytes": lambda path: sent(rows, path),
            "curves": lambda path: curves(rows, path),
        }
        for name, drawing in told.items():
            if name == "map-tuned" and len(factors(rows, "tuned")) < len(BANDWIDTHS):
                continue  # a few cells are no map
            if name == "rates" and not tried(rows):
                continue
            paths.append(folder / f"race-simulated-{name}.png")
            drawing(paths[-1])
    if (folder / "race-defaults-cifar-wan.jsonl").exists():
        paths.append(folder / "race-defaults-time.png")
        time_spent(folder / "race-defaults-cifar-wan.jsonl", paths[-1])
    found = in_order(folder)
    if found:
        paths.append(folder / "race-defaults-late.png")
        lateness_of_cells(found, paths[-1])
    pairs = both(folder)
    if pairs:
        paths.append(folder / "race-simulated-reality.png")
        reality(pairs, paths[-1])
    return paths


def shares(cells: dict[Cell, Raced], path: Path) -> None:
    """A line for each latency: the least one solid, the longest dotted."""
    first, *others = (
        [named(one) for cell, one in cells.items() if cell in MAP and cell.latency == latency]
        for latency in (LATENCIES[0], *reversed(LATENCIES[1:]))
    )
    draw_shares(first, path, *others)


def on_map(cells: dict[Cell, Raced]) -> list[Raced]:
    """Those that differ in their links alone."""
    return [one for cell, one in cells.items() if cell in MAP]


def named(one: Raced) -> Raced:
    """With short names."""
    times = {short(method): seconds for method, seconds in one.times.items()}
    return Raced(one.track, one.cell, times, one.merge_over_step, one.seeds)


# The map


def best_rival(one: Raced) -> tuple[str, float]:
    """The method that is there first, and its seconds; streaming averaging is none."""
    rivals = {
        name: seconds
        for name, seconds in one.times.items()
        if name != "ideal" and not is_default(name)
    }
    best = min(rivals, key=lambda name: rivals[name])
    return best, rivals[best]


def factor(default: float, rival: float) -> float:
    """The default's time over the rival's; infinite where it never arrived, 0 if they did not."""
    if math.isinf(default):
        return math.inf
    return default / rival


def factors(
    rows: Sequence[Row], track: str, own: str = "defaults", cells: Sequence[Cell] = MAP
) -> dict[Cell, tuple[float, str]]:
    """Of these cells the default's time over that of the track's best rival, and who that is.

    Args:
        rows: The results.
        track: Of the rivals.
        own: Of the default: with nothing set but the rate; or tuned, too.
        cells: Which.
    """
    ours, rivals = (raced(rows, "mlp", one) for one in (own, track))
    found = {}
    for cell in (one for one in cells if one in ours and one in rivals):
        name, seconds = best_rival(rivals[cell])
        found[cell] = factor(ours[cell].times["streaming"], seconds), name
    return found


def regret_map(rows: Sequence[Row], path: Path, track: str) -> None:
    """Over bandwidth and latency, what the default with nothing set took, over the best rival's."""
    figure, axes = new_figure(WIDTH, 2.6, dpi=DPI)
    fair = factors(rows, track, track)
    for cell, (found, name) in factors(rows, track).items():
        x, y = BANDWIDTHS.index(cell.bandwidth), LATENCIES.index(cell.latency)
        name = short(name).partition(":")[0].partition(" (")[0]
        if found:
            also = f"\n({fair[cell][0]:.2f})" if track == "tuned" else ""
            show_factor(axes, x, y, found, FONT, f"{also}\n{name}")
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


# Lines


def rates(rows: Sequence[Row], path: Path) -> None:
    """Final metric against the factor on the rate, of every method as it comes; one seed."""
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
        axes.plot(scales, finals, style, color=f"C{number}", label=short(method), markersize=5)
    axes.set_xscale("log")
    axes.set_xticks(FACTORS, [f"{one:g}" for one in FACTORS])
    axes.minorticks_off()
    axes.set_xlabel("times the recipe's learning rate")
    axes.set_ylim(60)  # below, a run has diverged
    axes.set_ylabel("final accuracy, % (simulated)")
    legend_below(figure, axes)
    figure.savefig(path)


def sent(rows: Sequence[Row], path: Path) -> None:
    """Final metric against what a worker sends, a mark a cell of the map; medians."""
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
            label=short(method),
            markersize=5,
            alpha=0.7,
        )
    axes.set_xscale("log")
    axes.set_xlabel("MB that a worker hands to the network")
    axes.set_ylabel("final accuracy, % (simulated)")
    legend_below(figure, axes)
    figure.savefig(path)


def curves(rows: Sequence[Row], path: Path, cell: Cell = TUNED_AT) -> None:
    """The metric against seconds in one cell, medians over the seeds with their range."""
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
        axes.plot(*(seconds, [*map(statistics.median, metrics)]), color=colour, label=short(method))
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


# Real processes


def time_spent(path: Path, picture: Path) -> None:
    """Where the time of each method went, in a cell on real processes."""
    rows = rows_of(read_results(path))
    figure, axes = canvas(0.9 + 0.4 * len(rows), legend=len(PARTS))
    split = [time_split(row, rows) for row in rows]
    left = [0.0] * len(rows)
    for part, colour in zip(PARTS, ("C0", "C1", "C3", "C7"), strict=True):
        values = [100 * one.get(part, 0.0) for one in split]
        if any(values):
            axes.barh(range(len(rows)), values, left=left, color=colour, height=0.6, label=part)
            left = [a + b for a, b in zip(left, values, strict=True)]
    axes.set_yticks(
        range(len(rows)), [wrapped(short(row.name).partition(" (")[0], 22) for row in rows]
    )
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, 100)
    cell = path.stem.split("-", 2)[2]
    axes.set_xlabel(f"% of the time, {cell}")
    legend_below(figure, axes, 2)
    figure.savefig(picture)


def in_order(folder: Path) -> Cells:
    """The cells with results whose ideal trained for long enough, as the race names them."""
    found = {cell: one for cell, one in real_curves(folder).items() if seconds_of(one[0])}
    known = [one.name for one in race.CELLS if one.name in found]
    return {cell: found[cell] for cell in dict.fromkeys([*known, *found])}


def lateness_of_cells(cells: Cells, path: Path) -> None:
    """At the last of the seconds, a line a cell, a mark a method; bars: 95 % intervals."""
    order = list(cells)
    methods = list(dict.fromkeys(name for cell in order for name in cells[cell][0]))
    methods = [one for one in methods if one != "ideal"]
    figure, axes = canvas(0.9 + 0.2 * len(order), legend=len(methods))
    for number, method in enumerate(methods):
        main = is_default(method) or method == OURS
        drawn = {
            "color": f"C{number % 10}" if main else str(0.25 + 0.55 * number / len(methods)),
            "markersize": 6 if main else 4,
            "linestyle": "none",
            "zorder": 3 if main else 2,
        }
        found = at_last(cells, method)
        axes.errorbar(
            [mean for mean, _ in found.values()],
            [order.index(cell) for cell in found],
            xerr=[half for _, half in found.values()],
            fmt=MARKERS[number % len(MARKERS)],
            label=short(method),
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
"""Cell, method, seconds of the ideal; how late in the simulator, and how late on real processes."""


def both(folder: Path = RESULTS) -> list[Pair]:
    """How late each method is, where it was run in both worlds; means over the seeds of each.

    The simulated runs are those of ``benchmarks.ablation`` with four workers.
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
            worlds = virtual, measured[real][0]
            found += [
                (real, method, at, late_at(worlds[0], method, at), late_at(worlds[1], method, at))
                for method in virtual
                if method != "ideal" and method in worlds[1]
                for at in AT
            ]
    return found


def reality(pairs: Sequence[Pair], path: Path) -> None:
    """Lateness on real processes against that in the simulator."""
    known = [one for one in pairs if one[3] is not None and one[4] is not None]
    names = [*dict.fromkeys((cell, method) for cell, method, *_ in known)]
    figure, axes = canvas(3.2, legend=len(names))
    for number, (cell, method) in enumerate(names):
        own = [one for one in known if one[:2] == (cell, method)]
        label = f"{short(method).partition(' (')[0]}, {REAL[cell]}"
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
