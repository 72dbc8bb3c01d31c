"""What the pages say about speed, made from results only: ``python -m benchmarks evidence``.

Draws the pictures of the race into ``results/`` and ``docs/images/``, and rewrites what
``docs/evidence.md`` and the README quote: the first paragraph, the first table of each section of
``tables``, and the paragraph of the README that begins with ``CLAIM``. A test compares.
"""

import math
import re
import shutil
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks import race_figures, race_pictures
from benchmarks.harness import RESULTS
from benchmarks.race_figures import Raced
from benchmarks.race_late import (
    SECONDS,
    SOON,
    against,
    covers,
    curves,
    late,
    late_at,
    overview,
    seconds_of,
    sooner,
)
from benchmarks.race_names import EARLIER, is_default, short
from benchmarks.race_pictures import (
    IMAGES,
    REAL,
    best_rival,
    both,
    factor,
    factors,
    in_order,
    on_map,
)
from benchmarks.race_simulated import (
    BANDWIDTHS,
    CORNERS,
    FACTORS,
    MAP,
    OTHERS,
    SHARE,
    Cell,
    arrival,
    raced,
    read,
    tried,
)
from benchmarks.virtual import Row

ROOT = RESULTS.parents[1]
PAGE, README = ROOT / "docs" / "evidence.md", ROOT / "README.md"
RIVAL = "diloco:period=16"
"""Our strongest on real links, and the one with most runs."""
CLAIM = "In virtual time, on links"
LATE = 1.1
"""Times the ideal's: the target."""


def draws(folder: Path = RESULTS) -> list[Path]:
    """All pictures, and copies for the pages."""
    paths = race_pictures.draw(read(folder), folder)
    for path in paths:
        shutil.copy(path, IMAGES)
    return paths


# Sentences


def lead(folder: Path = RESULTS) -> str:
    """The first paragraph: where the default loses."""
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
        found = factors(rows, track, own)
        if not found:
            continue
        lost = {cell: one for cell, one in found.items() if one[0] > 1}
        told = ", ".join(
            f"{cell.bandwidth} and {cell.latency:g} ms ({_name(name)}, {_times(times)})"
            for cell, (times, name) in lost.items()
        )
        text = f"it is later than the best {rival} in {len(lost)} of {len(found)} cells of the map"
        parts.append(f"{text}: {told}" if lost else text)
    cells = on_map(raced(rows, "mlp", "defaults"))
    behind = [one for one in cells if one.share("streaming") < 1]
    text = f"In virtual time {'; '.join(parts)}."
    for cell, (times, name) in factors(rows, "defaults", cells=OTHERS).items():
        if times > 1:
            text += f" It is later than {_name(name)}, {_times(times)}, with {_besides(cell)}."
    if behind:
        worst = min(behind, key=lambda one: one.share("streaming"))
        text += (
            f" It is behind the ideal in {len(behind)} of {len(cells)} cells, at worst with "
            f"{_share(worst)} of its speed ({worst.cell})."
        )
    return f"{text} {_strictly(rows)}"


def _strictly(rows: Sequence[Row]) -> str:
    """Who comes as far as is asked for on real links, over all runs of the map."""
    own = [row for row in rows if (row["workload"], row["track"]) == ("mlp", "defaults")]
    ideal = [row["points"][-1][1] for row in own if row["family"] == "ideal"]
    target = race_figures.SHARE * statistics.median(ideal)
    found: dict[str, list[bool]] = {}
    for row in own:
        if row["cell"] in MAP and row["family"] != "ideal":
            found.setdefault(row["family"], []).append(math.isfinite(arrival(row, target)))
    told = ", ".join(
        f"{_name(name)} {sum(of)} of {len(of)}"
        for name, of in sorted(found.items(), key=lambda one: -sum(one[1]))
    )
    return (
        f"These are times to {100 * SHARE:g} % of the ideal's final accuracy; as far as "
        f"{100 * race_figures.SHARE:g} % came, of the runs of the map: {told}."
    )


def _late_on_processes(folder: Path) -> str:
    worst: dict[str, float] = {}
    beaten: dict[str, list[str]] = {}
    for cell, (methods, less) in curves(folder).items():
        seconds = seconds_of(methods)
        if not seconds:
            continue
        for name in filter(is_default, methods):
            own = [late_at(methods, name, at, less=less) for at in seconds]
            worst[cell] = max(math.inf if one is None else one for one in own)
            for rival in methods:
                if rival == "ideal" or is_default(rival):
                    continue
                ahead = [at for at in seconds if sooner(methods, rival, name, at, less=less)]
                if ahead:
                    when = ", ".join(f"{at:g}" for at in ahead)
                    beaten.setdefault(short(rival), []).append(f"{cell} (after {when} s)")
    if not worst:
        return ""
    behind = {cell: one for cell, one in sorted(worst.items(), key=lambda of: -of[1]) if one > LATE}
    text = (
        "On real processes, which share two cores, it takes at its worst over "
        f"{LATE:g} times the ideal's time in {len(behind)} of {len(worst)} cells"
    )
    if behind:
        text += f": {', '.join(f'{cell} {_ratio(one)}' for cell, one in behind.items())}"
    told = "; ".join(f"{rival} in {', '.join(cells)}" for rival, cells in beaten.items())
    return f"{text}. Ahead of it there are: {told}." if beaten else f"{text}. No rival is ahead."


def claim(rows: Sequence[Row]) -> str:
    """What the README says of the simulated race, as methods come and, if that was run, tuned."""
    usual, tuned = factors(rows, "defaults"), factors(rows, "tuned", "tuned")
    latencies = sorted({cell.latency for cell in usual})
    text = (
        f"{CLAIM} from {BANDWIDTHS[0]} to {BANDWIDTHS[-1]} with {latencies[0]:g} to "
        f"{latencies[-1]:g} ms of latency, a small model is the first at {100 * SHARE:g} % of the "
        f"ideal's final accuracy under streaming averaging in {_won(usual)}, against BSP, local "
        "SGD, DiLoCo, asynchronous averaging and SelSync, each at the best of "
        f"{len(FACTORS)} learning rates, nothing else set"
    )
    if tuned:
        text += f", and in {_won(tuned)} with all of them tuned alike"
    return _wrapped(
        f"{text}. [Evidence](docs/evidence.md) has all of it, and begins with what is lost."
    )


def _won(found: Mapping[Cell, tuple[float, str]]) -> str:
    """How many cells, and what is lost in the others."""
    lost = [one for one, _ in found.values() if one > 1]
    known = [one for one in lost if math.isfinite(one)]
    text = []
    if known:
        text.append(f"up to {max(known):.2f} times the best one's time in {len(known)}")
    if len(known) < len(lost):
        text.append(f"never there in {len(lost) - len(known)}")
    return f"{len(found) - len(lost)} of {len(found)} cells" + (
        f" ({', '.join(text)})" if text else ""
    )


def _times(value: float) -> str:
    return "streaming never" if math.isinf(value) else f"{value:.2f} times"


def _name(method: str) -> str:
    return short(method).partition(" (")[0]


def _share(one: Raced) -> str:
    return f"{100 * one.share('streaming'):.0f} %"


def _wrapped(text: str) -> str:
    return "\n".join(textwrap.wrap(text, 100, break_long_words=False, break_on_hyphens=False))


# Tables


def map_table(rows: Sequence[Row]) -> str:
    """A line a cell of the map: the ideal, the default, the best rival, as it comes and tuned."""
    defaults, tuned = (raced(rows, "mlp", track) for track in ("defaults", "tuned"))
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
            f"{_seconds(seconds)} `{short(name)}`",
            _ratio(factor(one.times["streaming"], seconds)),
        ]
        if cell in tuned:
            name, seconds = best_rival(tuned[cell])
            shown += [
                f"{_seconds(seconds)} `{_setting(rows, cell, name)}`",
                _ratio(factor(one.times["streaming"], seconds)),
                _seconds(tuned[cell].times["streaming"]),
                _ratio(factor(tuned[cell].times["streaming"], seconds)),
            ]
        else:
            shown += ["not run"] * 4
        lines.append(f"| {' | '.join(shown)} |")
    return "\n".join(lines)


def _besides(cell: Cell) -> str:
    """What is not usual in a cell."""
    return cell.name.removeprefix(f"{cell.bandwidth} {cell.latency:g}ms ")


def _ratio(value: float) -> str:
    return "never" if math.isinf(value) else f"{value:.2f}"


def others_table(rows: Sequence[Row]) -> str:
    """The cells beside the map."""
    found = raced(rows, "mlp", "defaults")
    return _columns({_besides(one): found[one] for one in OTHERS if one in found})


def corners_table(rows: Sequence[Row]) -> str:
    """The corners of the map with the CNN."""
    found = raced(rows, "cnn", "defaults")
    return _columns(
        {f"{one.bandwidth}, {one.latency:g} ms": found[one] for one in CORNERS if one in found}
    )


def _columns(cells: Mapping[str, Raced]) -> str:
    """A line a method, a column a cell; in brackets shares of the ideal's speed."""
    methods = list(dict.fromkeys(name for one in cells.values() for name in one.times))
    lines = [f"| method | {' | '.join(cells)} |", "|---|" + "--:|" * len(cells)]
    for method in methods:
        times = [
            f"{_seconds(one.times[method])} ({100 * one.share(method):.0f} %)"
            if math.isfinite(one.times[method])
            else "never"
            for one in cells.values()
        ]
        lines.append(f"| `{short(method)}` | {' | '.join(times)} |")
    return "\n".join(lines)


def tuning_table(rows: Sequence[Row]) -> str:
    """Family → how many runs its tuning took, and what it chose, over the cells of the map."""
    lines = ["| family | runs | chosen, and in how many cells |", "|---|--:|---|"]
    for family, runs in tried(rows).items():
        chosen: dict[str, set[Cell]] = {}
        for row in rows:
            if (row["workload"], row["track"], row["family"]) == ("mlp", "tuned", family):
                chosen.setdefault(row["method"], set()).add(row["cell"])
        told = ", ".join(f"`{short(name)}` {len(cells)}" for name, cells in chosen.items())
        lines.append(f"| {family} | {runs} | {told} |")
    return "\n".join(lines)


def reality_table(folder: Path = RESULTS) -> str:
    """How late, simulated and measured."""
    lines = ["| link | method | after | simulated | measured |", "|--:|---|--:|--:|--:|"]
    for cell, method, at, virtual, real in both(folder):
        shown = ["never" if one is None else f"{one:.2f}" for one in (virtual, real)]
        name = short(method)
        lines.append(f"| {REAL[cell]} | `{name}` | {at:g} s | {' | '.join(shown)} |")
    return "\n".join(lines)


def _seconds(value: float) -> str:
    return "never" if math.isinf(value) else f"{value:.1f} s"


def _spread(rows: Sequence[Row], cell: Cell, family: str) -> str:
    """The median over the seeds, and their range."""
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
        short(row["method"])
        for row in rows
        if (row["track"], row["family"], row["cell"]) == ("tuned", family, cell)
    )


def tables(folder: Path = RESULTS) -> dict[str, str]:
    """Section of the page → its table; of sections that have results."""
    rows = read(folder)
    found = {
        "On real processes": overview(in_order(folder)),
        "Every method": late(folder, SECONDS),
    }
    soon = [cell for cell, (runs, _) in curves(folder).items() if not covers(runs, SECONDS)]
    if soon:
        found["A small model on real processes"] = late(folder, SOON, only=soon)
    if tuned := late(folder, SECONDS, "tuned"):
        found["With rates tuned"] = tuned
    if paired := against(folder, SECONDS, RIVAL):
        found["Streaming, less late than DiLoCo"] = paired
    if curves(folder, EARLIER):
        found["Before two bits"] = late(folder, SECONDS, EARLIER)
    if rows:
        found["On simulated links"] = map_table(rows)
        if any(row["cell"] in OTHERS for row in rows):
            found["Uneven workers, and more of them"] = others_table(rows)
        if any(row["workload"] == "cnn" for row in rows):
            found["A larger model"] = corners_table(rows)
        if factors(rows, "tuned"):
            found["What tuning took"] = tuning_table(rows)
    if both(folder):
        found["The simulator against real processes"] = reality_table(folder)
    return {section: table for section, table in found.items() if table}


# Pages


def page(text: str, folder: Path = RESULTS) -> str:
    """The page with what its results say now."""
    head, _, rest = text.partition("\n\n")
    _, _, rest = rest.partition("\n\n")
    text = f"{head}\n\n{lead(folder)}\n\n{rest}"
    for section, table in tables(folder).items():
        heading = f"\n## {section}\n"
        if heading not in text:
            raise ValueError(f"the page has no section {section!r}")
        before, _, after = text.partition(heading)
        old = re.search(r"(?:^\|.*\n)+", after, flags=re.MULTILINE)
        if old is None:
            raise ValueError(f"section {section!r} of the page has no table")
        after = f"{after[: old.start()]}{table}\n{after[old.end() :]}"
        text = before + heading + after
    return text


def readme(text: str, folder: Path = RESULTS) -> str:
    """The README likewise."""
    rows = read(folder)
    parts = text.split("\n\n")
    return "\n\n".join(claim(rows) if rows and one.startswith(CLAIM) else one for one in parts)


def main() -> None:
    for path in draws():
        print(path)
    for path, made in ((PAGE, page), (README, readme)):
        path.write_text(made(path.read_text(encoding="utf-8")), encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
