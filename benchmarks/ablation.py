"""What each part of streaming averaging is worth, in virtual time: one factor at a time.

Real training; steps of 80 ms that vary by 5 %, nothing computed for the network:

- ``cnn``: 2.1 million parameters on CIFAR-10, SGD with momentum, two passes of 16,000 images
  (``benchmarks/models/cifar_wide.py``; ``OFFBEAT_CIFAR10`` names the directory of the data);
- ``lm``: the recipe ``stdlib-lm``, a transformer with AdamW;
- ``cnn-decay``, ``mnist``, ``digits``: for the end of a full schedule. The first is ``cnn`` with a
  rate that falls to nothing (``OFFBEAT_MNIST`` names the directory of the second).

Every cell is compared with the ideal (synchronous SGD on a network that takes no time) of its task,
workers and seed: how many times as long it takes to the metrics that the ideal has after a half,
three quarters and the whole of its time. Runs are kept in
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
from benchmarks.lateness import lateness, summary
from benchmarks.virtual import MNIST, Cells, Row
from offbeat.lab.compare import run_and_record
from offbeat.lab.job import Job
from offbeat.lab.places import VirtualCluster
from offbeat.lab.report.intervals import interval_of
from offbeat.simulate import Compute, Network

SHARED = Path(__file__).parents[2] / "shared" / "data"
CIFAR10 = os.environ.get("OFFBEAT_CIFAR10", str(SHARED / "cifar10"))
MODELS = Path(__file__).parent / "models"


@dataclass(frozen=True)
class Workload:
    """What is trained: a recipe, its data, how many passes, and whether less is better."""

    recipe: str
    data: str | None
    epochs: float
    less: bool = False


TASKS = {
    "cnn": Workload(str(MODELS / "cifar_wide.py"), CIFAR10, 2.0),
    "lm": Workload("stdlib-lm", None, 0.5, less=True),
    "cnn-decay": Workload(str(MODELS / "cifar_wide_decay.py"), CIFAR10, 3.0),
    "mnist": Workload("mnist:cnn", str(MNIST), 1.0),
    "digits": Workload("digits", None, 20.0),
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


DILOCO = "diloco:period=16,outer_lr=0.7,outer_momentum=0.5,fragments=4,overlap=4 --wire int4"


def cells(seeds: Sequence[int]) -> list[Cell]:
    """All of them, the most telling first."""
    found: list[tuple[str, str, int, str, str]] = []
    for task in ("cnn", "lm"):
        found.append(("ideal", task, 4, "1Gbit/s", "ideal"))
        found += [("default", task, 4, bandwidth, "streaming") for bandwidth in BANDWIDTHS]
        found += [("default", task, 4, "50Mbit/s", DILOCO)]
    for scale in (0.5, 2.0, 4.0):
        for method in ("ideal", "streaming", "streaming:outer_gain=1", DILOCO):
            text = f"{method} --lr-scale {scale:g}"
            found += [("rate", task, 4, "50Mbit/s", text) for task in ("cnn", "lm")]
    for text in (
        *(f"streaming:outer_gain={gain}" for gain in ("1", "2")),
        *(f"streaming --wire {wire}" for wire in ("auto", "int4", "int8", "float32")),
        *(f"streaming:parts={count}" for count in (1, 2, 8, 16)),
        "async:schedule=eager,staleness=64 --wire int2",
        "async:schedule=eager,staleness=64 --wire int8",
    ):
        found += [("factor", task, 4, "50Mbit/s", text) for task in ("cnn", "lm")]
    for task in ("cnn", "lm"):
        for workers in (8, 16):
            found.append(("ideal", task, workers, "1Gbit/s", "ideal"))
            found += [
                ("default", task, workers, bandwidth, "streaming")
                for bandwidth in ("200Mbit/s", "50Mbit/s")
            ]
    return [Cell(*one, seed) for seed in seeds for one in found]


def finals(seeds: Sequence[int]) -> list[Cell]:
    """Full schedules, for what they end with, on links that are slow for each."""
    links = {"digits": "5Mbit/s", "mnist": "10Mbit/s", "cnn-decay": "50Mbit/s", "lm": "10Mbit/s"}
    return [
        Cell("final", task, 4, bandwidth, method, seed)
        for task, bandwidth in links.items()
        for seed in seeds
        for method in ("ideal", "streaming", DILOCO)
    ]


def run(cell: Cell) -> Row:
    """One run: its points."""
    torch.set_num_threads(1)
    task = TASKS[cell.task]
    job = Job(
        task.recipe,
        "bsp",
        cell.workers,
        epochs=task.epochs,
        seed=cell.seed,
        data=task.data,
        evaluations=12,
    ).under(cell.method.replace("ideal", "bsp"))
    bandwidth = "100Tbit/s" if "ideal" in cell.method else cell.bandwidth
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


def late(row: Row, ideal: Row, *, less: bool) -> list[float | None]:
    """Its lateness at each of ``PARTS_OF_THE_TIME``."""
    own, best = (
        [(point["seconds"], point["metric"]) for point in one["points"]] for one in (row, ideal)
    )
    return [lateness(own, best, share * best[-1][0], less=less) for share in PARTS_OF_THE_TIME]


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
        "| task | workers | link | method | at ½ | at ¾ | at 1 | last metric | idle | seeds |",
        "|---|--:|--:|---|--:|--:|--:|--:|--:|--:|",
    ]
    for (task, workers, bandwidth, method), members in groups.items():
        less = TASKS[task].less
        known = [r for r in members if (task, workers, r["cell"]["seed"]) in ideals]
        if not known:
            continue
        found = [late(row, ideals[task, workers, row["cell"]["seed"]], less=less) for row in known]
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--only", default="", help="cells that have this in their texts")
    parser.add_argument("--finals", action="store_true", help="full schedules instead")
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args()
    seeds = [int(seed) for seed in given.seeds.split(",")]
    wanted = [
        cell
        for cell in (finals(seeds) if given.finals else cells(seeds))
        if cell.factor == "ideal" or given.only in f"{cell.task} {cell.bandwidth} {cell.method}"
    ]
    kept = Cells(run, RESULTS / "cells" / "ablation.jsonl", processes=given.processes)
    rows = kept.rows(wanted)
    path = RESULTS / ("ablation-ends.md" if given.finals else "ablation.md")
    path.write_text(ends(rows) if given.finals else table(rows))
    print(path)


if __name__ == "__main__":
    main()
