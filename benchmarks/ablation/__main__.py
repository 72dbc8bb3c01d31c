"""The ablation of streaming averaging in virtual time: one factor at a time.

Training is real; steps take 80 ms and vary by 5 %; computing for the network takes no time.

- ``cnn``: 2.1 million parameters on CIFAR-10, SGD with momentum, two passes over 16,000 images
  (``benchmarks/models/cifar_wide.py``; ``OFFBEAT_CIFAR10`` names the directory of the data);
- ``lm``: the recipe ``stdlib-lm``, a transformer with AdamW;
- ``cnn-decay``, ``cnn-norm``, ``cnn-large``, ``mnist``, ``digits``: tasks whose final metric is
  compared. The first three are ``cnn`` with a rate that decays to 0, with BatchNorm, and with
  8.5 million parameters; ``OFFBEAT_MNIST`` names the directory of the fourth.

Every run is compared with the ideal network (BSP without communication time) of the same task,
workers and seed. An interrupted ablation resumes. Results are in ``results/ablation.jsonl``, from
which ``tables`` makes ``ablation.md``, ``ablation-ends.md`` and the table of
``docs/streaming-ablation.md``.

    python -m benchmarks.ablation [--seeds 0,1] [--only WORD] [--finals]
    python -m benchmarks.ablation --table
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.ablation import tables
from benchmarks.harness import CIFAR10, MNIST, RESULTS, ROOT
from benchmarks.race.methods import DILOCO
from benchmarks.run_cache import Row, RunCache
from offbeat.lab.compare import run_and_record
from offbeat.lab.job import Job
from offbeat.lab.launch.runners import VirtualCluster
from offbeat.simulate import Compute, Network

MODELS = ROOT / "benchmarks" / "models"


@dataclass(frozen=True)
class Workload:
    """A training task.

    Attributes:
        recipe: Name or file of the recipe.
        data: Directory of the data; None if the recipe needs no files.
        epochs: Passes over the data.
        less: True if a lower metric is better.
    """

    recipe: str
    data: str | None
    epochs: float
    less: bool = False


TASKS = {
    "cnn": Workload(str(MODELS / "cifar_wide.py"), CIFAR10, 2.0),
    "lm": Workload("stdlib-lm", None, 0.5, less=True),
    "cnn-norm": Workload(str(MODELS / "cifar_wide_norm.py"), CIFAR10, 2.0),
    "cnn-large": Workload(str(MODELS / "cifar_wide_large.py"), CIFAR10, 2.0),
    "cnn-decay": Workload(str(MODELS / "cifar_wide_decay.py"), CIFAR10, 3.0),
    "mnist": Workload("mnist:cnn", str(MNIST), 1.0),
    "digits": Workload("digits", None, 20.0),
}
LESS = frozenset(name for name, task in TASKS.items() if task.less)
"""Tasks for which a lower metric is better."""
BANDWIDTHS = ("1Gbit/s", "200Mbit/s", "50Mbit/s", "10Mbit/s")
STEP_SECONDS = 0.08
PUBLISHED = RESULTS / "ablation.jsonl"
PAGE = ROOT / "docs" / "streaming-ablation.md"


@dataclass(frozen=True)
class Cell:
    """One run; ``factor`` names the group of runs that it belongs to."""

    factor: str
    task: str
    workers: int
    bandwidth: str
    method: str
    seed: int


LOW_RANK = "benchmarks.low_rank:LowRank:rank={}"


def cells(seeds: Sequence[int], *, ended: bool = False) -> list[Cell]:
    """Return all runs but those of ``finals``, the most important first.

    Args:
        seeds: Seeds of the runs.
        ended: True to include a published trial whose code was removed: parts of low rank.
    """
    found: list[tuple[str, str, int, str, str]] = []
    for task in ("cnn", "lm"):
        found.append(("ideal", task, 4, "1Gbit/s", "ideal"))
        found += [("default", task, 4, bandwidth, "streaming") for bandwidth in BANDWIDTHS]
        found += [("default", task, 4, "50Mbit/s", DILOCO)]
    for text in (
        *(f"streaming:outer_gain={gain}" for gain in (1, 2)),
        *(f"streaming --wire {wire}" for wire in ("int4", "int8", "float32", "auto")),
        "streaming:outer_gain=2 --wire int4",  # does quantization only act by a larger gain?
        *(f"streaming:parts={count}" for count in (1, 4, 8, 16)),
        "async:schedule=eager,staleness=64 --wire int2",
    ):
        found += [("factor", task, 4, "50Mbit/s", text) for task in ("cnn", "lm")]
    for task, scales in (("cnn", (0.5, 2, 4)), ("lm", (0.5, 2, 4, 8))):
        for scale in scales:
            for method in ("ideal", "streaming", DILOCO):
                found.append(("rate", task, 4, "50Mbit/s", f"{method} --lr-scale {scale:g}"))
    found += [
        # Is the network the cause of losses at high rates? Does a staleness bound help old parts?
        ("rate", "cnn", 4, "1Gbit/s", "streaming --lr-scale 2"),
        ("rate", "cnn", 4, "100Tbit/s", "streaming --lr-scale 2"),
        ("rate", "cnn", 4, "100Tbit/s", "streaming --wire float32 --lr-scale 2"),
        ("rate", "lm", 4, "100Tbit/s", "streaming --wire float32 --lr-scale 4"),
        ("rate", "lm", 4, "100Tbit/s", "streaming --lr-scale 4"),
        ("brake", "cnn", 4, "10Mbit/s", "streaming:staleness=12"),
        ("brake", "cnn", 4, "10Mbit/s", "streaming:staleness=6"),
        ("brake", "lm", 4, "50Mbit/s", "streaming:staleness=2 --lr-scale 4"),
    ]
    for task, link, setting in (
        *(("cnn", "50Mbit/s", one) for one in ("4", "16", "4,slices=64", "8,slices=16")),
        *(("cnn", "10Mbit/s", one) for one in ("4", "16")),
        ("lm", "50Mbit/s", "8"),
    ):
        if ended:
            found.append(("low rank", task, 4, link, LOW_RANK.format(setting)))
    for workers in (8, 16):
        for task in ("cnn", "lm"):
            found.append(("ideal", task, workers, "1Gbit/s", "ideal"))
            found += [("default", task, workers, "50Mbit/s", m) for m in ("streaming", DILOCO)]
    return [Cell(*one, seed) for seed in seeds for one in found]


def finals(seeds: Sequence[int]) -> list[Cell]:
    """Return the runs whose final metric is compared, on links that are slow for each task."""
    links = {
        "digits": "5Mbit/s",
        "mnist": "10Mbit/s",
        "cnn-decay": "50Mbit/s",
        "cnn-norm": "50Mbit/s",
        "cnn-large": "50Mbit/s",
        "lm": "10Mbit/s",
    }
    return [
        Cell("final", task, 4, bandwidth, method, seed)
        for task, bandwidth in links.items()
        for seed in seeds
        for method in ("ideal", "streaming", DILOCO)
    ]


def run(cell: Cell) -> Row:
    """Train; return the points and totals."""
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


def publish(rows: Sequence[Row], path: Path) -> None:
    """Add the rows to the published file; a row replaces that of the same run."""
    known = {_same(row): row for row in [*read(path), *rows]}
    new = path.with_suffix(".new")  # so that an interruption never leaves half of the file
    new.write_text("".join(json.dumps(row) + "\n" for row in known.values()))
    new.replace(path)


def read(path: Path) -> list[Row]:
    """Return the published rows."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _same(row: Row) -> str:
    """Return the key of a run; of its factor only counts whether it is ``final``."""
    cell = dict(row["cell"])
    return json.dumps(cell | {"factor": cell["factor"] == "final"})


def main() -> None:
    """Run what is missing, and make the pages."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--only", default="", help="only runs with this in task, link or method")
    parser.add_argument(
        "--finals", action="store_true", help="run the tasks whose final metric is compared"
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--table", action="store_true", help="run nothing, only make the pages")
    given = parser.parse_args()
    if not given.table:
        seeds = [int(seed) for seed in given.seeds.split(",")]
        wanted = [
            cell
            for cell in (finals(seeds) if given.finals else cells(seeds))
            if cell.factor == "ideal" or given.only in f"{cell.task} {cell.bandwidth} {cell.method}"
        ]
        cache = RunCache(run, RESULTS / "cells" / "ablation.jsonl", processes=given.processes)
        publish(cache.rows(wanted), PUBLISHED)
    rows = read(PUBLISHED)
    curves = [row for row in rows if row["cell"]["factor"] != "final"]
    (RESULTS / "ablation.md").write_text(tables.slowdown_table(curves, LESS))
    full = [row for row in rows if row["cell"]["factor"] == "final"]
    (RESULTS / "ablation-ends.md").write_text(tables.finals_table(full))
    PAGE.write_text(tables.insert(PAGE.read_text(), page_table()))
    print(RESULTS / "ablation.md", RESULTS / "ablation-ends.md", PAGE, sep="\n")


def page_table() -> str:
    """Return the table of the page, from the published rows."""
    order = [*dict.fromkeys((c.workers, c.bandwidth, c.method) for c in cells([0], ended=True))]
    rows = [row for row in read(PUBLISHED) if row["cell"]["factor"] != "final"]
    return tables.page_table(rows, order)


if __name__ == "__main__":
    main()
