"""SelSync, Figures 5 and 6: Δ and accuracy over a run, and δ against LSSR and accuracy.

The CNN on CIFAR-10 of ``convergence``, 8 workers. Figure 5: is Δ, recorded at each step of a BSP
run, large while the accuracy rises, and small afterwards? Figure 6: SelSync with δ from 0 to 0.5,
and with a δ that is never reached.
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
from benchmarks.papers.runs import SEEDS, Row, small_figure
from offbeat_lab.compare import run_and_record
from offbeat_lab.results import Result

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
    """Return the mean Δ of each tenth of the run."""
    steps, found = len(row["change"]), []
    for i in range(PIECES):
        changes = row["change"][steps * i // PIECES : steps * (i + 1) // PIECES]
        found.append({"mean": statistics.fmean(one for one in changes if one is not None)})
    return found


def facts(runs: Mapping[str, Sequence[Result]]) -> list[dict[str, Any]]:
    """Return the data of each δ."""
    return [
        {
            "delta": None if math.isinf(delta) else delta,
            "lssr": [one.lssr for one in runs[selsync(delta)]],
            "final": [one.final for one in runs[selsync(delta)]],
        }
        for delta in DELTAS
    ]


def draw(data: dict[str, Any]) -> None:
    """Draw Δ and accuracy over the steps, and LSSR and accuracy over δ."""
    with small_figure("papers-delta", "", "", of=2) as (left, right):
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


def measure(seeds: int = SEEDS) -> dict[str, Any]:
    """Return the data of both figures."""
    row = recorded()
    runs = SETTINGS["cifar"].run([*map(selsync, DELTAS)], seeds)
    return {"facts": facts(runs), "pieces": pieces(row), "recorded": row}
