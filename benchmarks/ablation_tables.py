"""Tables of ``benchmarks.ablation``, made from its rows alone."""

import statistics
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from benchmarks.lateness import lateness, summary
from benchmarks.race_names import short
from benchmarks.virtual import Row
from offbeat.lab.report.intervals import interval_of

PARTS_OF_THE_TIME = (0.5, 0.75, 1.0)
"""Of the ideal's; what it has by then is the target."""
MARKS = ("<!-- ablation -->", "<!-- end of the ablation -->")
_HEADS = ("CNN, accuracy", "less the ideal's", "transformer, bits a byte", "less the ideal's")
Run = tuple[int, str, str]
"""Workers, link and method."""


def into(page: str, table: str) -> str:
    """The page with this table between the marks.

    Raises:
        ValueError: the page has no marks.
    """
    before, mark, rest = page.partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    if not mark or not end:
        raise ValueError(f"the page has no {' and '.join(MARKS)}")
    return f"{before}{mark}\n{table}{end}{after}"


def apart(rows: Sequence[Row], order: Sequence[Run]) -> str:
    """Markdown: what each run ends with, and the paired difference to the ideal's.

    Args:
        rows: Of the CNN and the transformer, their ideals among them.
        order: The lines; one of which nothing was run is left out.
    """
    accuracy, bits = _ends(rows, "cnn"), _ends(rows, "lm")
    lines = [f"| workers | link | method | {' | '.join(_HEADS)} |", f"|--:|--:|---{'|--:' * 4}|"]
    for run in order:
        if run in accuracy or run in bits:
            workers, link, method = run
            cells = (
                *_beside_ideal(accuracy, run, 100.0, "%.1f %%", "%+.1f"),
                *_beside_ideal(bits, run, 1.0, "%.3f", "%+.3f"),
            )
            link = "" if "ideal" in method else link
            lines.append(f"| {workers} | {link} | `{short(method)}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _ends(rows: Sequence[Row], task: str) -> dict[Run, dict[int, float]]:
    """The last metric under each seed."""
    found: dict[Run, dict[int, float]] = defaultdict(dict)
    for row in rows:
        c = row["cell"]
        if c["task"] == task:
            end = row["points"][-1]["metric"]
            found[c["workers"], c["bandwidth"], c["method"]][c["seed"]] = end
    return found


def _beside_ideal(
    ends: Mapping[Run, Mapping[int, float]], run: Run, scale: float, form: str, difference: str
) -> tuple[str, str]:
    """Mean and paired difference: an interval, or where there are too few pairs, the pairs."""
    own = {seed: scale * end for seed, end in ends.get(run, {}).items()}
    if not own:
        return "", ""
    count = "" if len(own) == 3 else f" ({len(own)})"
    mean = form % statistics.fmean(own.values()) + count
    if run[2] == "ideal":
        return mean, ""
    ideal = next((one for key, one in ends.items() if key[::2] == (run[0], "ideal")), {})
    pairs = [end - scale * ideal[seed] for seed, end in own.items() if seed in ideal]
    if len(pairs) < 3:
        return mean, ", ".join(difference % one for one in pairs)
    found = interval_of(pairs)
    half = (difference % (found.high - found.mean)).removeprefix("+")
    return mean, f"{difference % found.mean} ± {half}"


def late(row: Row, ideal: Row, *, less: bool) -> list[float | None]:
    """Its lateness at each of ``PARTS_OF_THE_TIME``."""
    own, best = (
        [(point["seconds"], point["metric"]) for point in one["points"]] for one in (row, ideal)
    )
    return [lateness(own, best, share * best[-1][0], less=less) for share in PARTS_OF_THE_TIME]


def lateness_of(rows: Sequence[Row], less: Collection[str]) -> str:
    """Markdown: how late each cell is, over its seeds.

    Args:
        rows: Of one or more tasks, their ideals among them.
        less: Tasks whose metric is better where it is less.
    """
    ideals = {
        (c["task"], c["workers"], c["seed"]): row
        for row in rows
        if (c := row["cell"])["factor"] == "ideal"
    }
    groups: dict[tuple[str, int, str, str], list[Row]] = defaultdict(list)
    for row in rows:
        c = row["cell"]
        if c["factor"] != "ideal":
            groups[c["task"], c["workers"], c["bandwidth"], c["method"]].append(row)
    lines = [
        "| task | workers | link | method | at ½ | at ¾ | at 1 | last metric | idle | seeds |",
        "|---|--:|--:|---|--:|--:|--:|--:|--:|--:|",
    ]
    for (task, workers, bandwidth, method), members in groups.items():
        known = [r for r in members if (task, workers, r["cell"]["seed"]) in ideals]
        if not known:
            continue
        found = [
            late(row, ideals[task, workers, row["cell"]["seed"]], less=task in less)
            for row in known
        ]
        text = " | ".join(summary(column) for column in zip(*found, strict=True))
        ends = [
            (row["points"][-1]["metric"], ideals[task, workers, row["cell"]["seed"]])
            for row in known
        ]
        metric = statistics.mean(end for end, _ in ends)
        best = statistics.mean(ideal["points"][-1]["metric"] for _, ideal in ends)
        idle = 100 * statistics.mean(row["idle"] for row in known)
        lines.append(
            f"| {task} | {workers} | {bandwidth} | `{method}` | {text} | "
            f"{metric:.3f} (ideal {best:.3f}) | {idle:.0f} % | {len(known)} |"
        )
    return "\n".join(lines) + "\n"


def ends(rows: Sequence[Row]) -> str:
    """Markdown: what full schedules end with, and the paired differences to the ideal."""
    ideals = {
        (c["task"], c["seed"]): row["points"][-1]["metric"]
        for row in rows
        if "ideal" in (c := row["cell"])["method"]
    }
    groups: dict[tuple[str, str, str], list[Row]] = defaultdict(list)
    for row in rows:
        c = row["cell"]
        groups[c["task"], c["bandwidth"], c["method"]].append(row)
    lines = ["| task | link | method | at the end | less the ideal's | seeds |"]
    lines.append("|---|--:|---|--:|--:|--:|")
    for (task, bandwidth, method), members in groups.items():
        last = [row["points"][-1]["metric"] for row in members]
        text = ""
        if "ideal" not in method:
            pairs = [
                row["points"][-1]["metric"] - ideals[task, row["cell"]["seed"]]
                for row in members
                if (task, row["cell"]["seed"]) in ideals
            ]
            if len(pairs) > 1:
                found = interval_of(pairs)
                text = f"{found.mean:+.4f} ± {found.high - found.mean:.4f}"
        link = "" if "ideal" in method else bandwidth
        lines.append(
            f"| {task} | {link} | `{method}` | {statistics.mean(last):.4f} | {text} | "
            f"{len(members)} |"
        )
    return "\n".join(lines) + "\n"
