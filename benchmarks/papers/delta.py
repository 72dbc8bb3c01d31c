"""SelSync, Figures 5 and 6: Δ and accuracy over a run, and δ against LSSR and accuracy.

The CNN on CIFAR-10 of ``convergence``, 8 workers. Figure 5: is Δ, recorded at each step of a BSP
run, large while the accuracy rises, and small afterwards? Figure 6: SelSync with δ from 0 to 0.5,
and with a δ that is never reached.

    python -m benchmarks.papers.delta
"""

import json
import math
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.papers.convergence import SETTINGS, WORKERS, selsync
from benchmarks.papers.runs import Row, best_of, parser_for, percent, save, small_figure
from offbeat_lab.compare import run_and_record
from offbeat_lab.results import Result

NAME = "delta"
DELTAS = (0.0, 0.1, 0.3, 0.5, math.inf)
PIECES = 10


def recorded() -> Row:
    """Run BSP with the first seed, and return Δ of worker 0 at each step and the accuracies.

    Δ is None where it is not defined.
    """
    setting = SETTINGS["cifar"]
    with tempfile.TemporaryDirectory() as directory:
        job = setting.job.under(selsync(0.0))
        job = replace(job, log=str(Path(directory) / "records.jsonl"))
        result = run_and_record(job, lambda event: None, setting.cluster)
        first = sorted(Path(directory).iterdir())[0]
        records = [json.loads(line) for line in first.read_text().splitlines()]
    changes = [one["change"] for one in records if "change" in one]
    return {
        "points": [{"step": one.step, "metric": one.metric} for one in result.points],
        "change": [one if _finite(one) else None for one in changes],
    }


def _finite(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value)


def pieces(row: Row) -> list[dict[str, float]]:
    """Return, for each tenth of the run, mean and largest Δ and the rise of the best accuracy."""
    steps = len(row["change"])
    best: list[tuple[int, float]] = [(0, 0.1)]  # of ten classes
    for one in row["points"]:
        best.append((one["step"], max(best[-1][1], one["metric"])))

    def at(step: float) -> float:
        return max(metric for when, metric in best if when <= step)

    found = []
    for i in range(PIECES):
        start, end = steps * i // PIECES, steps * (i + 1) // PIECES
        changes = [one for one in row["change"][start:end] if one is not None]
        found.append(
            {
                "mean": statistics.fmean(changes),
                "largest": max(changes),
                "gain": at(end) - at(start),
            }
        )
    return found


def facts(runs: Mapping[str, Sequence[Result]]) -> list[dict[str, Any]]:
    """Return the data of each δ."""
    return [
        {
            "delta": None if math.isinf(delta) else delta,
            "lssr": [one.lssr for one in runs[selsync(delta)]],
            "final": [one.final for one in runs[selsync(delta)]],
            "best": [best_of(one) for one in runs[selsync(delta)]],
        }
        for delta in DELTAS
    ]


def table(data: dict[str, Any]) -> str:
    """Return the table as Markdown."""
    lines = ["| δ | LSSR | accuracy at the end, % | best, % |", "|--:|--:|--:|--:|"]
    for one in data["facts"]:
        delta = "∞" if one["delta"] is None else f"{one['delta']:g}"
        lssr = f"{statistics.median(one['lssr']):.3f}"
        lines.append(f"| {delta} | {lssr} | {percent(one['final'])} | {percent(one['best'])} |")
    return "\n".join(lines)


def table_of_pieces(data: dict[str, Any]) -> str:
    """Return Δ and the accuracy's rise over the run as Markdown."""
    head = " | ".join(f"{10 * i}–{10 * i + 10} %" for i in range(PIECES))
    lines = [f"| part of the run | {head} |", f"|---|{'--:|' * PIECES}"]
    for name, key, scale, digits in (
        ("mean Δ", "mean", 1, 3),
        ("largest Δ", "largest", 1, 2),
        ("rise of the best accuracy, points", "gain", 100, 1),
    ):
        values = " | ".join(f"{scale * one[key]:.{digits}f}" for one in data["pieces"])
        lines.append(f"| {name} | {values} |")
    return "\n".join(lines)


def draw(data: dict[str, Any]) -> None:
    """Draw Δ and accuracy over the steps, and LSSR and accuracy over δ."""
    with small_figure(f"papers-{NAME}", "", "", of=2) as (left, right):
        changes = [one or math.nan for one in data["recorded"]["change"]]
        left.plot(range(1, len(changes) + 1), changes, lw=0.6, label="Δ of worker 0 (BSP)")
        points = data["recorded"]["points"]
        xs, ys = ([one[key] for one in points] for key in ("step", "metric"))
        left.plot(xs, ys, label="test accuracy")
        left.set(xlabel="step", ylabel="Δ; accuracy, as a share", ylim=(0, 1))
        shown = [one for one in data["facts"] if one["delta"] is not None]
        deltas = [one["delta"] for one in shown]
        for key, name in (("lssr", "LSSR"), ("final", "accuracy at the end")):
            right.plot(deltas, [statistics.median(o[key]) for o in shown], "o-", label=name)
        right.set(xlabel="threshold δ", ylabel="LSSR; accuracy, as a share", ylim=(0, 1.02))
        right.set_title(f"{WORKERS} workers, CIFAR-10 (simulated)", fontsize="medium")


def main() -> None:
    seeds = parser_for(__doc__).parse_args().seeds
    runs = SETTINGS["cifar"].run([*map(selsync, DELTAS)], seeds)
    row = recorded()
    data = {"workers": WORKERS, "facts": facts(runs), "pieces": pieces(row), "recorded": row}
    save(NAME, data)
    draw(data)
    print(table(data), table_of_pieces(data), sep="\n\n")


if __name__ == "__main__":
    main()
