"""Tables of the ablation, as Markdown, from its rows only."""

import statistics
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from benchmarks.race.methods import short_name
from benchmarks.race.slowdown import slowdown, summary
from benchmarks.run_cache import Row
from offbeat.lab.report.intervals import MIN_SEEDS, interval_of

SHARES = (0.5, 0.75, 1.0)
"""Shares of the ideal network's time after which the slowdown is shown."""
MARKS = ("<!-- ablation -->", "<!-- end of the ablation -->")
_HEADS = ("CNN, accuracy", "less the ideal's", "transformer, bits a byte", "less the ideal's")
Run = tuple[int, str, str]
"""Workers, link and method."""


def insert(page: str, table: str) -> str:
    """Return the page with this table between ``MARKS``.

    Raises:
        ValueError: The page has no marks.
    """
    before, mark, rest = page.partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    if not mark or not end:
        raise ValueError(f"the page has no {' and '.join(MARKS)}")
    return f"{before}{mark}\n{table}{end}{after}"


def page_table(rows: Sequence[Row], order: Sequence[Run]) -> str:
    """Return the final metric of each run, and its paired difference to the ideal network's.

    Args:
        rows: Rows of the CNN and the transformer, with their ideal networks.
        order: Runs in the order of the lines; those without rows are left out.
    """
    accuracy, bits = _ends(rows, "cnn"), _ends(rows, "lm")
    lines = [f"| workers | link | method | {' | '.join(_HEADS)} |", f"|--:|--:|---{'|--:' * 4}|"]
    for run in order:
        if run in accuracy or run in bits:
            workers, link, method = run
            cells = (
                *_against_ideal(accuracy, run, 100.0, "%.1f %%", "%+.1f"),
                *_against_ideal(bits, run, 1.0, "%.3f", "%+.3f"),
            )
            link = "" if "ideal" in method else link
            lines.append(f"| {workers} | {link} | `{short_name(method)}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _ends(rows: Sequence[Row], task: str) -> dict[Run, dict[int, float]]:
    """Return the final metric of each run of a task, by seed."""
    found: dict[Run, dict[int, float]] = defaultdict(dict)
    for row in rows:
        c = row["cell"]
        if c["task"] == task:
            end = row["points"][-1]["metric"]
            found[c["workers"], c["bandwidth"], c["method"]][c["seed"]] = end
    return found


def _against_ideal(
    ends: Mapping[Run, Mapping[int, float]], run: Run, scale: float, form: str, difference: str
) -> tuple[str, str]:
    """Return mean and paired difference as text; fewer than three differences are listed."""
    own = {seed: scale * end for seed, end in ends.get(run, {}).items()}
    if not own:
        return "", ""
    count = "" if len(own) == 3 else f" ({len(own)})"
    mean = form % statistics.fmean(own.values()) + count
    if run[2] == "ideal":
        return mean, ""
    ideal = next((one for key, one in ends.items() if key[::2] == (run[0], "ideal")), {})
    pairs = [end - scale * ideal[seed] for seed, end in own.items() if seed in ideal]
    if len(pairs) < MIN_SEEDS:
        return mean, ", ".join(difference % one for one in pairs)
    found = interval_of(pairs)
    low, high = difference % found.low, difference % found.high
    return mean, f"{difference % found.mean} [{low}, {high}]"


def _slowdowns(row: Row, ideal: Row, *, less: bool) -> list[float | None]:
    """Return the slowdown at each of ``SHARES``."""
    own, best = (
        [(point["seconds"], point["metric"]) for point in one["points"]] for one in (row, ideal)
    )
    return [slowdown(own, best, share * best[-1][0], lower_is_better=less) for share in SHARES]


def slowdown_table(rows: Sequence[Row], less: Collection[str]) -> str:
    """Return the slowdowns of each run over its seeds.

    Args:
        rows: Rows of one or more tasks, with their ideal networks.
        less: Tasks for which a lower metric is better.
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
            _slowdowns(row, ideals[task, workers, row["cell"]["seed"]], less=task in less)
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


def finals_table(rows: Sequence[Row]) -> str:
    """Return final metrics of full schedules, and paired differences to the ideal network's."""
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
            if len(pairs) >= MIN_SEEDS:
                found = interval_of(pairs)
                text = f"{found.mean:+.4f} [{found.low:+.4f}, {found.high:+.4f}]"
            elif len(pairs) > 1:
                text = f"{statistics.mean(pairs):+.4f}"
        link = "" if "ideal" in method else bandwidth
        lines.append(
            f"| {task} | {link} | `{method}` | {statistics.mean(last):.4f} | {text} | "
            f"{len(members)} |"
        )
    return "\n".join(lines) + "\n"
