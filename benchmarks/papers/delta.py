"""SelSync, Figures 5, 6 and 10: Δ over a run, the choice of δ, and parameters or gradients.

The CNN on CIFAR-10 of ``convergence``, 8 workers. Figure 5: is Δ, recorded at each step of a BSP
run (SelSync with δ = 0), large while the accuracy rises, and small afterwards? Figure 6: SelSync
with δ up to 0.5, and with a δ that is never reached. Figure 10: gradients are averaged instead.

Accuracies are the best of a run, as in ``convergence``. If gradients are averaged, or nothing, the
workers' models differ, and their mean model may be far worse than each. So Figure 10 and the δ that
is never reached have the mean of the accuracies that the workers' own models have at the end.
"""

import json
import math
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.papers.choices import rotated
from benchmarks.papers.convergence import SETTINGS, WORKERS, selsync, smoothed
from benchmarks.papers.runs import SEEDS, Row, best_of, grouped, kept, small_figure
from offbeat_lab.compare import run_and_record
from offbeat_lab.results import Result

DELTAS = (0.1, 0.3, 0.5)
OWN = (
    *((aggregate, delta) for aggregate in ("gradients", "parameters") for delta in (0.1, 0.3)),
    ("parameters", None),
)
"""What is averaged, and δ, in the runs whose models are evaluated one by one; None is ∞."""
PIECES = 10


def recorded(seed: int) -> Row:
    """Run BSP, and return Δ of worker 0 at each step, the accuracies and the losses.

    Δ is None where it is not defined.
    """
    setting = SETTINGS["cifar"]
    with tempfile.TemporaryDirectory() as directory:
        job = setting.job.under(selsync(0.0))
        job = replace(job, seed=seed, log=str(Path(directory) / "records.jsonl"))
        result = run_and_record(job, lambda event: None, setting.cluster)
        first = sorted(Path(directory).iterdir())[0]
        records = [json.loads(line) for line in first.read_text().splitlines()]
    changes = [one["change"] for one in records if "change" in one]
    return {
        "lssr": result.lssr,
        "best": best_of(smoothed(result)),
        "loss": result.final_metrics["loss"],
        "points": [{"step": one.step, **one.metrics} for one in result.points],
        "change": [one if _finite(one) else None for one in changes],
    }


def _finite(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value)


def pieces(row: Row) -> list[dict[str, float]]:
    """Return the mean Δ of each tenth of the run, and the rise of the accuracy in it, from 0 on."""
    steps, found, before = len(row["change"]), [], 0.0
    for i in range(PIECES):
        changes = row["change"][steps * i // PIECES : steps * (i + 1) // PIECES]
        points = row["points"][: len(row["points"]) * (i + 1) // PIECES]
        mean = statistics.fmean(one for one in changes if one is not None)
        found.append({"mean": mean, "gain": points[-1]["accuracy"] - before})
        before = points[-1]["accuracy"]
    return found


def facts(runs: Mapping[str, Sequence[Result]]) -> list[dict[str, Any]]:
    """Return the data of each δ."""
    return [
        {
            "delta": delta,
            "lssr": [one.lssr for one in runs[selsync(delta)]],
            "best": [best_of(smoothed(one)) for one in runs[selsync(delta)]],
            "loss": [one.final_metrics["loss"] for one in runs[selsync(delta)]],
        }
        for delta in DELTAS
    ]


def draw(data: dict[str, Any]) -> None:
    """Draw Δ and accuracy over the steps, and LSSR and accuracy over δ."""
    with small_figure("papers-delta", "", "", of=2) as (left, right):
        row = data["recorded"][0]
        changes = [math.nan if one is None else one for one in row["change"]]
        left.plot(range(1, len(changes) + 1), changes, lw=0.6, label="Δ of worker 0 (BSP)")
        xs, ys = ([one[key] for one in row["points"]] for key in ("step", "accuracy"))
        left.plot(xs, ys, label="test accuracy")
        left.set(xlabel="step", ylabel="Δ; accuracy, as a share", ylim=(0, 1))
        deltas = [one["delta"] for one in data["facts"]]
        for key, name in (("lssr", "LSSR"), ("best", "best accuracy")):
            medians = [statistics.median(one[key]) for one in data["facts"]]
            right.plot(deltas, medians, "o-", label=name)
        right.set(xlabel="threshold δ", ylabel="LSSR; accuracy, as a share", ylim=(0, 1.02))
        right.set_title(f"{WORKERS} workers, CIFAR-10 (simulated)", fontsize="medium")


def measure(seeds: int = SEEDS) -> dict[str, Any]:
    """Return the data of the figures."""
    setting = SETTINGS["cifar"]
    runs = setting.run([*map(selsync, DELTAS)], seeds)
    numbers = [{"seed": seed} for seed in range(seeds)]
    rows = kept("delta", numbers, recorded)
    wanted = [
        {"task": setting.task, "aggregate": aggregate, "sampler": "seldp", "passes": setting.epochs}
        | {"delta": delta, **number}
        for aggregate, delta in OWN
        for number in numbers
    ]
    groups = grouped(kept("delta-own", wanted, rotated), "aggregate", "delta")
    synchronous = {key: [row[key] for row in rows] for key in ("lssr", "best", "loss")}
    return {
        "facts": [{"delta": 0.0, **synchronous}, *facts(runs)],
        "own": [
            {"aggregate": aggregate, "delta": delta}
            | {key: [row[key] for row in found] for key in ("own", "own loss", "mean", "lssr")}
            for (aggregate, delta), found in groups.items()
        ],
        "pieces": [pieces(row) for row in rows],
        "recorded": rows,
    }
