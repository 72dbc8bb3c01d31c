"""The first paragraph of ``docs/evidence.md``: where the default loses, from the results."""

import math
import statistics
import textwrap
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import RESULTS
from benchmarks.race.curves import curves, is_ahead, mean_slowdown, seconds_of
from benchmarks.race.methods import is_default, short_name
from benchmarks.race.simulated_results import (
    CellTimes,
    against_best_rival,
    arrival,
    read,
    times_of,
)
from benchmarks.race.simulated_settings import MAP, OTHERS, SHARE
from benchmarks.race.simulated_tables import as_ratio, differences
from benchmarks.run_cache import Row

TARGET = 1.1
"""Largest slowdown that is not called a loss."""
REAL_SHARE = 0.98
"""Share of the ideal network's final metric that is the target on real links."""


def lead(folder: Path = RESULTS) -> str:
    """Return the first paragraph of the page: where the default loses."""
    rows = read(folder)
    text = ["Where streaming averaging, the default, loses."]
    if rows:
        text.append(_lost_on_the_map(rows))
    text.append(_late_on_processes(folder))
    text.append(
        "A [transformer with AdamW](streaming.md#what-was-measured) is what it does least well: "
        "the ideal stays ahead of it at every learning rate that was tried."
    )
    return _wrapped(" ".join(one for one in text if one))


def _lost_on_the_map(rows: Sequence[Row]) -> str:
    parts = []
    for own, track, rival in (
        ("defaults", "defaults", "rival as it comes"),
        ("defaults", "tuned", "tuned rival"),
        ("tuned", "tuned", "tuned rival, tuned itself,"),
    ):
        found = against_best_rival(rows, track, own)
        if not found:
            continue
        lost = {cell: one for cell, one in found.items() if one[0] > 1}
        where = ", ".join(
            f"{cell.bandwidth} and {cell.latency:g} ms ({_name(name)}, {_times(times)})"
            for cell, (times, name) in lost.items()
        )
        text = f"it is later than the best {rival} in {len(lost)} of {len(found)} cells of the map"
        parts.append(f"{text}: {where}" if lost else text)
    all_times = times_of(rows, "mlp", "defaults")
    cells = [one for cell, one in all_times.items() if cell in MAP]
    behind = [one for one in cells if one.share("streaming") < 1]
    text = f"In virtual time {'; '.join(parts)}."
    for cell, (times, name) in against_best_rival(rows, "defaults", cells=OTHERS).items():
        if times > 1:
            text += f" It is later than {_name(name)}, {_times(times)}, with {differences(cell)}."
    if behind:
        worst = min(behind, key=lambda one: one.share("streaming"))
        text += (
            f" It is behind the ideal in {len(behind)} of {len(cells)} cells, at worst with "
            f"{_share(worst)} of its speed ({worst.cell})."
        )
    return f"{text} {_strictly(rows)}"


def _strictly(rows: Sequence[Row]) -> str:
    """Return how many runs of the map reach the share that is the target on real links."""
    own = [row for row in rows if (row["workload"], row["track"]) == ("mlp", "defaults")]
    ideal = [row["points"][-1][1] for row in own if row["family"] == "ideal"]
    target = REAL_SHARE * statistics.median(ideal)
    found: dict[str, list[bool]] = {}
    for row in own:
        if row["cell"] in MAP and row["family"] != "ideal":
            found.setdefault(row["family"], []).append(math.isfinite(arrival(row, target)))
    counts = ", ".join(
        f"{_name(name)} {sum(of)} of {len(of)}"
        for name, of in sorted(found.items(), key=lambda one: -sum(one[1]))
    )
    return (
        f"These are times to {100 * SHARE:g} % of the ideal's final accuracy; as far as "
        f"{100 * REAL_SHARE:g} % came, of the runs of the map: {counts}."
    )


def _late_on_processes(folder: Path) -> str:
    worst: dict[str, float] = {}
    beaten: dict[str, list[str]] = {}
    for cell, (methods, less) in curves(folder).items():
        seconds = seconds_of(methods)
        if not seconds:
            continue
        for name in filter(is_default, methods):
            own = [mean_slowdown(methods, name, at, less=less) for at in seconds]
            worst[cell] = max(math.inf if one is None else one for one in own)
            for rival in methods:
                if rival == "ideal" or is_default(rival):
                    continue
                ahead = [at for at in seconds if is_ahead(methods, rival, name, at, less=less)]
                if ahead:
                    when = ", ".join(f"{at:g}" for at in ahead)
                    beaten.setdefault(short_name(rival), []).append(f"{cell} (after {when} s)")
    if not worst:
        return ""
    behind = {
        cell: one for cell, one in sorted(worst.items(), key=lambda of: -of[1]) if one > TARGET
    }
    text = (
        "On real processes, which share two cores, it takes at its worst over "
        f"{TARGET:g} times the ideal's time in {len(behind)} of {len(worst)} cells"
    )
    if behind:
        text += f": {', '.join(f'{cell} {as_ratio(one)}' for cell, one in behind.items())}"
    ahead_of_it = "; ".join(f"{rival} in {', '.join(cells)}" for rival, cells in beaten.items())
    return (
        f"{text}. Ahead of it there are: {ahead_of_it}."
        if beaten
        else f"{text}. No rival is ahead."
    )


def _times(value: float) -> str:
    return "streaming never" if math.isinf(value) else f"{value:.2f} times"


def _name(method: str) -> str:
    return short_name(method).partition(" (")[0]


def _share(one: CellTimes) -> str:
    return f"{100 * one.share('streaming'):.0f} %"


def _wrapped(text: str) -> str:
    return "\n".join(textwrap.wrap(text, 100, break_long_words=False, break_on_hyphens=False))
