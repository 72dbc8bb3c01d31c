"""Real training in virtual time, on links as slow for the small models as the papers' for theirs.

A *link* gives the time of a step, and a bandwidth that is the paper's times our model's bytes over
its model's: so a mean takes as many steps here as there.
"""

import argparse
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS, machine
from benchmarks.virtual import MNIST, SEEDS, Cells, Row, run_at, spread
from offbeat.lab.job import Job
from offbeat.lab.launch.runners import VirtualCluster
from offbeat.lab.recipes import find_recipe
from offbeat.simulate import Compute, Network

CIFAR10 = os.environ.get(
    "OFFBEAT_CIFAR10", str(Path(__file__).parents[3] / "shared" / "data" / "cifar10")
)
MODELS = Path(__file__).parents[1] / "models" / "papers.py"
JITTER = 0.05
TASKS = {
    "cifar": (f"{MODELS}:cifar", CIFAR10),
    "cifar-decay": (f"{MODELS}:cifar_decay", CIFAR10),
    "cifar-few": (f"{MODELS}:cifar_few", CIFAR10),
    "mnist": (f"{MODELS}:mnist_flat", str(MNIST)),
}


@dataclass(frozen=True)
class Link:
    """A paper's network, for a model of so many megabytes that takes so long for a step."""

    bandwidth: float
    megabytes: float
    step_seconds: float


LINKS = {
    # asynchronous averaging: GoogLeNet over 1 Gbit/s; a merge on 4 workers takes 3.2 steps
    "googlenet": Link(1e9, 26.5, 0.1),
    # SelSync: ResNet-101 over 5 Gbit/s, at the step time that its Table I asks for; 8.1 steps
    "resnet101": Link(5e9, 178.2, 0.066),
}


@dataclass(frozen=True)
class Run:
    """One training run."""

    task: str
    link: str
    workers: int
    method: str
    epochs: float
    evaluations: int
    seed: int


def job_of(run: Run) -> Job:
    recipe, data = TASKS[run.task]
    return Job(
        recipe,
        "bsp",
        run.workers,
        epochs=run.epochs,
        seed=run.seed,
        data=data,
        evaluations=run.evaluations,
    ).under(run.method)


@cache
def model_bytes(task: str) -> int:
    recipe, data = TASKS[task]
    built = find_recipe(recipe).build(Job(recipe, data=data).setup())
    return 4 * sum(one.numel() for one in built.model.parameters())


def place_of(task: str, link: str) -> VirtualCluster:
    one = LINKS[link]
    bandwidth = one.bandwidth * model_bytes(task) / (1e6 * one.megabytes)
    return VirtualCluster(
        Network(bandwidth, latency="100us"), Compute(one.step_seconds, jitter=JITTER)
    )


def train(run: Run) -> Row:
    """The row of a run: evaluations, steps, seconds, LSSR, idle share, bytes."""
    row = run_at(job_of(run), place_of(run.task, run.link))
    return {
        **{key: row[key] for key in ("steps", "seconds", "final", "lssr", "idle", "payload_bytes")},
        "run": asdict(run),
        "points": [
            {key: one[key] for key in ("step", "seconds", "metric")} for one in row["points"]
        ],
    }


def parser_for(description: str | None) -> argparse.ArgumentParser:
    """Of a figure's command line: all three seeds, or ``--seeds 1``."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="how many; default 3")
    return parser


def seeds_asked(description: str | None) -> tuple[int, ...]:
    """Of the command line, where it says nothing else."""
    return tuple(range(parser_for(description).parse_args().seeds))


def cells(name: str, function: Callable[[Any], Row] = train) -> Cells:
    """Kept rows: those of ``train`` are shared by the figures."""
    path = RESULTS / "cells" / f"papers-{name}.jsonl"
    return Cells(function, path, processes=0, progress=True)


def by_method(rows: Sequence[Row], *keys: str) -> dict[tuple[Any, ...], list[Row]]:
    """Rows of the same settings, in order; the seeds are what differs."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row["run"][key] for key in keys), []).append(row)
    return groups


def told(values: Sequence[float]) -> str:
    """Of shares: median and range in percent; of one alone itself."""
    return spread(values) if len(values) > 1 else f"{100 * values[0]:.1f}"


def path_of(name: str) -> Path:
    return RESULTS / f"papers-{name}.json"


def save(name: str, data: dict[str, Any]) -> None:
    """The file of a figure."""
    whole = {"simulated": True, **data, "machine": machine()}
    path_of(name).write_text(json.dumps(whole, indent=None, separators=(",", ":")) + "\n")
    print(path_of(name))


def saved(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path_of(name).read_text())
    return found
