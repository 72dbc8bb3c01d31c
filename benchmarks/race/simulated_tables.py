"""Tables of the race in virtual time, as Markdown, from its results only."""

import math
import statistics
from collections.abc import Mapping, Sequence

from benchmarks.race.methods import short_name
from benchmarks.race.simulated_results import (
    CellTimes,
    arrival,
    best_rival,
    time_ratio,
    times_of,
    tuning_runs,
)
from benchmarks.race.simulated_settings import CORNERS, MAP, OTHERS, SHARE, Cell
from benchmarks.run_cache import Row


def map_table(rows: Sequence[Row]) -> str:
    """Return a row for each cell of the map: streaming averaging and the best rivals."""
    defaults, tuned = (times_of(rows, "mlp", track) for track in ("defaults", "tuned"))
    lines = [
        "| link | latency | ideal | streaming | best rival | streaming / it | best tuned rival "
        "| streaming / it | streaming tuned | it / the rival |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for cell in (one for one in MAP if one in defaults):
        one = defaults[cell]
        name, seconds = best_rival(one)
        shown = [
            cell.bandwidth,
            f"{cell.latency:g} ms",
            _seconds(one.times["ideal"]),
            _spread(rows, cell, "streaming"),
            f"{_seconds(seconds)} `{short_name(name)}`",
            as_ratio(time_ratio(one.times["streaming"], seconds)),
        ]
        if cell in tuned:
            name, seconds = best_rival(tuned[cell])
            shown += [
                f"{_seconds(seconds)} `{_setting(rows, cell, name)}`",
                as_ratio(time_ratio(one.times["streaming"], seconds)),
                _seconds(tuned[cell].times["streaming"]),
                as_ratio(time_ratio(tuned[cell].times["streaming"], seconds)),
            ]
        else:
            shown += ["not run"] * 4
        lines.append(f"| {' | '.join(shown)} |")
    return "\n".join(lines)


def differences(cell: Cell) -> str:
    """Return the settings in which a cell differs from the default."""
    return cell.name.removeprefix(f"{cell.bandwidth} {cell.latency:g}ms ")


def as_ratio(value: float) -> str:
    """Return a ratio of times as text."""
    return "never" if math.isinf(value) else f"{value:.2f}"


def others_table(rows: Sequence[Row]) -> str:
    """Return the table of the cells outside the map."""
    found = times_of(rows, "mlp", "defaults")
    return _columns({differences(one): found[one] for one in OTHERS if one in found})


def corners_table(rows: Sequence[Row]) -> str:
    """Return the table of the map's corners with the CNN."""
    found = times_of(rows, "cnn", "defaults")
    return _columns(
        {f"{one.bandwidth}, {one.latency:g} ms": found[one] for one in CORNERS if one in found}
    )


def _columns(cells: Mapping[str, CellTimes]) -> str:
    """Return a row for each method and a column for each cell, with shares of the ideal's speed."""
    methods = list(dict.fromkeys(name for one in cells.values() for name in one.times))
    lines = [f"| method | {' | '.join(cells)} |", "|---|" + "--:|" * len(cells)]
    for method in methods:
        times = [
            f"{_seconds(one.times[method])} ({100 * one.share(method):.0f} %)"
            if math.isfinite(one.times[method])
            else "never"
            for one in cells.values()
        ]
        lines.append(f"| `{short_name(method)}` | {' | '.join(times)} |")
    return "\n".join(lines)


def tuning_table(rows: Sequence[Row]) -> str:
    """Return how many runs the tuning of each family took, and what it chose on the map."""
    lines = ["| family | runs | chosen, and in how many cells |", "|---|--:|---|"]
    for family, runs in tuning_runs(rows).items():
        chosen: dict[str, set[Cell]] = {}
        for row in rows:
            if (row["workload"], row["track"], row["family"]) == ("mlp", "tuned", family):
                chosen.setdefault(row["method"], set()).add(row["cell"])
        choices = ", ".join(f"`{short_name(name)}` {len(cells)}" for name, cells in chosen.items())
        lines.append(f"| {family} | {runs} | {choices} |")
    return "\n".join(lines)


def _seconds(value: float) -> str:
    return "never" if math.isinf(value) else f"{value:.1f} s"


def _spread(rows: Sequence[Row], cell: Cell, family: str) -> str:
    """Return the median over the seeds, and their range."""
    own = [r for r in rows if r["workload"] == "mlp" and r["cell"] == cell]
    own = [row for row in own if row["track"] == "defaults"]
    ideal = [row["points"][-1][1] for row in own if row["family"] == "ideal"]
    target = SHARE * statistics.median(ideal)
    times = [arrival(row, target) for row in own if row["family"] == family]
    middle = statistics.median(times)
    if math.isinf(max(times)):
        arrived = sum(map(math.isfinite, times))
        return f"{_seconds(middle)}, {arrived} of {len(times)}"
    return f"{middle:.1f} ({min(times):.1f}–{max(times):.1f}) s"


def _setting(rows: Sequence[Row], cell: Cell, family: str) -> str:
    return next(
        short_name(row["method"])
        for row in rows
        if (row["track"], row["family"], row["cell"]) == ("tuned", family, cell)
    )
