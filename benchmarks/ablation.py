"""What each part of streaming averaging is worth, in virtual time: one factor at a time.

Real training of two tasks; steps of 80 ms that vary by 5 %, nothing computed for the network:

- ``cnn``: 2.1 million parameters on CIFAR-10, SGD with momentum, two passes of 16,000 images
  (``benchmarks/models/cifar_wide.py``; ``OFFBEAT_CIFAR10`` names the directory of the data);
- ``lm``: the recipe ``stdlib-lm``, a transformer with AdamW.

Every cell is compared with the ideal (synchronous SGD on a network that takes no time) of its task,
workers and seed: how much longer it takes to the metrics that the ideal has reached after a half,
three quarters and the whole of its time, on average. Runs are kept in
``results/cells/ablation.jsonl``, so that it goes on where it was stopped. Writes
``results/ablation.md``.

    python -m benchmarks.ablation [--seeds 0,1] [--only WORD]
"""

import argparse
import os
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.harness import RESULTS
from benchmarks.virtual import Cells, Row
from offbeat.lab.compare import run_and_record
from offbeat.lab.job import Job
from offbeat.lab.places import VirtualCluster
from offbeat.simulate import Compute, Network

SHARED = Path(__file__).parents[2] / "shared" / "data"
CIFAR10 = Path(os.environ.get("OFFBEAT_CIFAR10", SHARED / "cifar10"))
TASKS = {  # recipe, passes of the data, whether less is better
    "cnn": (str(Path(__file__).parent / "models" / "cifar_wide.py"), 2.0, False),
    "lm": ("stdlib-lm", 0.5, True),
}
BANDWIDTHS = ("1Gbit/s", "200Mbit/s", "50Mbit/s", "10Mbit/s")
PARTS_OF_THE_TIME = (0.5, 0.75, 1.0)
STEP_SECONDS = 0.08


@dataclass(frozen=True)
class Cell:
    """One run."""

    factor: str
    task: str
    workers: int
    bandwidth: str
    method: str
    seed: int


def cells(seeds: Sequence[int]) -> list[Cell]:
    """All of them, the most telling first."""
    found: list[tuple[str, str, int, str, str]] = []
    for task in TASKS:
        found += [("ideal", task, n, "1Gbit/s", "ideal") for n in (4, 8, 16)]
        found += [("default", task, 4, bandwidth, "streaming") for bandwidth in BANDWIDTHS]
    for text in (
        *(f"streaming:parts={count}" for count in (1, 2, 8, 16)),
        *(f"streaming --wire {wire}" for wire in ("float32", "int8", "int4", "int2")),
        *(f"streaming:outer_gain={gain}" for gain in ("1", "2")),
        "async:schedule=eager,staleness=64 --wire int2",
        "async:schedule=eager,staleness=64 --wire int8",
        "diloco:period=16,outer_lr=0.7,outer_momentum=0.5,fragments=4,overlap=4 --wire int4",
    ):
        found += [("factor", task, 4, "50Mbit/s", text) for task in TASKS]
    for task in TASKS:
        found += [("default", task, n, b, "streaming") for n in (8, 16) for b in BANDWIDTHS]
    return [Cell(*one, seed) for seed in seeds for one in found]


def run(cell: Cell) -> Row:
    """One run: its points."""
    torch.set_num_threads(1)
    recipe, epochs, _ = TASKS[cell.task]
    data = str(CIFAR10) if cell.task == "cnn" else None
    job = Job(
        recipe, "bsp", cell.workers, epochs=epochs, seed=cell.seed, data=data, evaluations=12
    ).under("bsp" if cell.method == "ideal" else cell.method)
    bandwidth = "100Tbit/s" if cell.method == "ideal" else cell.bandwidth
    place = VirtualCluster(Network(bandwidth, latency="100us"), Compute(STEP_SECONDS, jitter=0.05))
    result = run_and_record(job, lambda event: None, place)
    return {
        "cell": asdict(cell),
        "points": [asdict(point) for point in result.points],
        "idle": result.idle,
        "payload_bytes": result.payload_bytes,
        "details": {
            key: value
            for key, value in result.stats[0].details.items()
            if isinstance(value, (int, float, str))
        },
    }


def lateness(row: Row, ideal: Row, *, less: bool) -> list[float | None]:
    """How many times as long it takes to the ideal's metrics; None: it does not get there."""
    sign = -1.0 if less else 1.0
    curve = _best(ideal["points"], sign)
    whole = curve[-1][0]
    found: list[float | None] = []
    for share in PARTS_OF_THE_TIME:
        target = next(metric for seconds, metric in curve if seconds >= share * whole * 0.999)
        reached = next(t for t, metric in curve if metric >= target)
        arrived = next((t for t, metric in _best(row["points"], sign) if metric >= target), None)
        found.append(None if arrived is None else arrived / reached)
    return found


def _best(points: Sequence[Row], sign: float) -> list[tuple[float, float]]:
    """The best metric so far, after so many seconds, on a fine grid between evaluations."""
    curve, best = [(0.0, -float("inf"))], -float("inf")
    for point in points:
        best, (before, low) = max(best, sign * point["metric"]), curve[-1]
        if low > -float("inf"):
            steps = 8
            for i in range(1, steps):
                share = i / steps
                between = before + share * (point["seconds"] - before)
                curve.append((between, low + share * (best - low)))
        curve.append((point["seconds"], best))
    return curve[1:]


def table(rows: Sequence[Row]) -> str:
    """Markdown: one line a cell, over the seeds."""
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
        "| task | workers | link | method | time / the ideal's | last metric | idle | seeds |",
        "|---|--:|--:|---|--:|--:|--:|--:|",
    ]
    for (task, workers, bandwidth, method), members in groups.items():
        less = TASKS[task][2]
        known = [r for r in members if (task, workers, r["cell"]["seed"]) in ideals]
        if not known:
            continue
        found = [
            late
            for row in known
            for late in lateness(row, ideals[task, workers, row["cell"]["seed"]], less=less)
        ]
        there = [late for late in found if late is not None]
        text = f"{statistics.mean(there):.2f} ×" if there else "-"
        if len(there) < len(found):
            text += f" ({len(there)} of {len(found)} reached)"
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--only", default="", help="cells that have this in their texts")
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args()
    wanted = [
        cell
        for cell in cells([int(seed) for seed in given.seeds.split(",")])
        if cell.factor == "ideal" or given.only in f"{cell.task} {cell.bandwidth} {cell.method}"
    ]
    kept = Cells(run, RESULTS / "cells" / "ablation.jsonl", processes=given.processes)
    rows = kept.rows(wanted)
    path = RESULTS / "ablation.md"
    path.write_text(table(rows))
    print(path)


if __name__ == "__main__":
    main()
