"""SelSync, Figures 5, 6 and 10: Δ over a run, the choice of δ, and parameters or gradients.

The CNN on CIFAR-10 of ``convergence``, 8 workers. Figure 5: is Δ, recorded at each step of a BSP
run (SelSync with δ = 0), large while the accuracy rises, and small afterwards? Figure 6: SelSync
with δ up to 0.5, and with a δ that is never reached. Figure 10: gradients are averaged instead.
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
from benchmarks.papers.runs import SEEDS, Row, kept, small_figure
from offbeat_lab.compare import run_and_record
from offbeat_lab.results import Result

DELTAS = (0.1, 0.3, 0.5, math.inf)
GRADIENTS = (0.1, 0.3)  # δ of the runs that average gradients
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
        "points": [{"step": one.step, **one.metrics} for one in result.points],
        "change": [one if _finite(one) else None for one in changes],
    }


def _finite(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value)


def pieces(row: Row) -> list[dict[str, float]]:
    """Return the mean Δ of each tenth of the run."""
    steps, found = len(row["change"]), []
    for i in range(PIECES):
        changes = row["change"][steps * i // PIECES : steps * (i + 1) // PIECES]
        found.append({"mean": statistics.fmean(one for one in changes if one is not None)})
    return found


def facts(
    runs: Mapping[str, Sequence[Result]], deltas: Sequence[float], name: str = "selsync"
) -> list[dict[str, Any]]:
    """Return the data of each δ, under the strategy of this name."""
    return [
        {
            "delta": None if math.isinf(delta) else delta,
            "lssr": [one.lssr for one in runs[selsync(delta, name)]],
            "final": [one.final for one in runs[selsync(delta, name)]],
            "loss": [one.final_metrics["loss"] for one in runs[selsync(delta, name)]],
        }
        for delta in deltas
    ]


def draw(data: dict[str, Any]) -> None:
    """Draw Δ and accuracy over the steps, and LSSR and accuracy over δ."""
    with small_figure("papers-delta", "", "", of=2) as (left, right):
        row = data["recorded"][0]
        changes = [one or math.nan for one in row["change"]]
        left.plot(range(1, len(changes) + 1), changes, lw=0.6, label="Δ of worker 0 (BSP)")
        xs, ys = ([one[key] for one in row["points"]] for key in ("step", "accuracy"))
        left.plot(xs, ys, label="test accuracy")
        left.set(xlabel="step", ylabel="Δ; accuracy, as a share", ylim=(0, 1))
        shown = [one for one in data["facts"] if one["delta"] is not None]
        deltas = [one["delta"] for one in shown]
        for key, name in (("lssr", "LSSR"), ("final", "accuracy at the end")):
            right.plot(deltas, [statistics.median(o[key]) for o in shown], "o-", label=name)
        right.set(xlabel="threshold δ", ylabel="LSSR; accuracy, as a share", ylim=(0, 1.02))
        right.set_title(f"{WORKERS} workers, CIFAR-10 (simulated)", fontsize="medium")


def measure(seeds: int = SEEDS) -> dict[str, Any]:
    """Return the data of the figures."""
    name = "selsync_gradients"
    methods = [*map(selsync, DELTAS), *(selsync(delta, name) for delta in GRADIENTS)]
    runs = SETTINGS["cifar"].run(methods, seeds)
    rows = kept("delta", [{"seed": seed} for seed in range(seeds)], recorded)
    ends = [row["points"][-1] for row in rows]
    synchronous = {
        "delta": 0.0,
        "lssr": [row["lssr"] for row in rows],
        "final": [end["accuracy"] for end in ends],
        "loss": [end["loss"] for end in ends],
    }
    return {
        "facts": [synchronous, *facts(runs, DELTAS)],
        "gradients": facts(runs, GRADIENTS, name),
        "pieces": [pieces(row) for row in rows],
        "recorded": rows,
    }
