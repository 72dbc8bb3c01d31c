"""Training runs for the papers' figures, in virtual time, and the files of their results.

A *link* has the step time of a paper's model, and its bandwidth scaled by the bytes of our model
over those of its model. So a mean takes as many steps here as in the paper.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.harness import CIFAR10, IMAGES, MNIST, RESULTS, machine
from benchmarks.run_cache import SEEDS, Row, RunCache, grouped, run_at, spread
from offbeat.simulate import Compute, Network
from offbeat_lab.job import Job
from offbeat_lab.launch.runners import VirtualCluster
from offbeat_lab.recipes import find_recipe

MODELS = Path(__file__).parents[1] / "models" / "papers.py"
JITTER = 0.05
TASKS: dict[str, tuple[str, str | None]] = {
    "cifar": (f"{MODELS}:cifar", CIFAR10),
    "cifar-decay": (f"{MODELS}:cifar_decay", CIFAR10),
    "cifar-few": (f"{MODELS}:cifar_few", CIFAR10),
    "digits-few": (f"{MODELS}:digits_few", None),
    "mnist": (f"{MODELS}:mnist_flat", str(MNIST)),
    "mnist-decay": (f"{MODELS}:mnist_decay", str(MNIST)),
}


@dataclass(frozen=True)
class Link:
    """A paper's network in bits a second, its model in megabytes, and its step time."""

    bandwidth: float
    megabytes: float
    step_seconds: float


LINKS = {
    # Asynchronous averaging: GoogLeNet over 1 Gbit/s; a merge on 4 workers takes 3.2 steps.
    "googlenet": Link(1e9, 26.5, 0.1),
    # SelSync: ResNet-101 over 5 Gbit/s, with the step time that follows from its Table I.
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
    """Train; return evaluations, steps, seconds, LSSR, idle share and bytes."""
    row = run_at(job_of(run), place_of(run.task, run.link))
    return {
        **{key: row[key] for key in ("steps", "seconds", "final", "lssr", "idle", "payload_bytes")},
        "run": asdict(run),
        "points": [
            {key: one[key] for key in ("step", "seconds", "metric")} for one in row["points"]
        ],
    }


def parser_for(description: str | None) -> argparse.ArgumentParser:
    """Return the parser of a figure's command line, with ``--seeds``."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="how many; default 3")
    return parser


def seeds_asked(description: str | None) -> tuple[int, ...]:
    """Return the seeds of a command line that has only ``--seeds``."""
    return tuple(range(parser_for(description).parse_args().seeds))


def cache_of(name: str, function: Callable[[Any], Row] = train) -> RunCache:
    """Return the cache of a function's runs; all figures share that of ``train``."""
    path = RESULTS / "cells" / f"papers-{name}.jsonl"
    return RunCache(function, path, processes=0, progress=True)


def rows_of(wanted: Sequence[Run], known: Sequence[Row]) -> list[Row]:
    """Return the row of each run. Runs among the ``known`` rows are not repeated."""
    runs = [row["run"] for row in known]
    new = cache_of("train").rows([one for one in wanted if asdict(one) not in runs])
    found = {json.dumps(row["run"]): row for row in (*known, *new)}
    return [found[json.dumps(asdict(one))] for one in wanted]


def by_method(rows: Sequence[Row], *keys: str) -> dict[tuple[Any, ...], list[Row]]:
    """Return ``grouped`` for rows of ``train``."""
    return grouped(rows, *keys, field="run")


def percent(values: Sequence[float]) -> str:
    """Return shares as text in percent: median and range, or the only one."""
    return spread(values) if len(values) > 1 else f"{100 * values[0]:.1f}"


def path_of(name: str) -> Path:
    """Return the path of a figure's results."""
    return RESULTS / f"papers-{name}.json"


def save(name: str, data: dict[str, Any]) -> None:
    """Write the results of a figure."""
    full = {"simulated": True, **data, "machine": machine()}
    path_of(name).write_text(json.dumps(full, indent=None, separators=(",", ":")) + "\n")
    print(path_of(name))


def saved(name: str) -> dict[str, Any]:
    """Return the results of a figure."""
    found: dict[str, Any] = json.loads(path_of(name).read_text())
    return found


@contextmanager
def small_figure(name: str, x: str, y: str, *, of: int = 1) -> Iterator[Any]:
    """Yield axes to draw on, ``of`` side by side, and save them as ``docs/images/NAME.png``."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, of, figsize=(4.8 * of, 3.6), layout="constrained")
    every = [axes] if of == 1 else list(axes)
    for one in every:
        one.set(xlabel=x, ylabel=y)
        one.grid(alpha=0.3)
    yield axes
    handles, labels = every[0].get_legend_handles_labels()
    if of > 1 and all(one.get_legend_handles_labels()[1] == labels for one in every):
        figure.legend(handles, labels, loc="outside right center", fontsize="small")
    else:
        for one in every:
            one.legend(fontsize="small")
    figure.savefig(IMAGES / f"{name}.png", dpi=100)
    plt.close(figure)
