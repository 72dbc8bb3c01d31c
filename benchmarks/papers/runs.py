"""Comparisons for the papers' figures, in virtual time, and the files of their results.

A *link* has the step time of a paper's model, and its bandwidth scaled by the bytes of our model
over those of its model. So a mean takes as many steps here as in the paper.
"""

import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import CIFAR10, IMAGES, MNIST, RESULTS, machine
from offbeat.extend import new_figure
from offbeat.simulate import Compute, Network
from offbeat_lab.compare import compare
from offbeat_lab.job import Job
from offbeat_lab.launch.runners import VirtualCluster
from offbeat_lab.recipes import find_recipe
from offbeat_lab.results import Result, by_seed

MODELS = Path(__file__).parents[1] / "models" / "papers.py"
JITTER = 0.05
SEEDS = 3
TASKS: dict[str, tuple[str, str | None]] = {
    "cifar": (f"{MODELS}:cifar", CIFAR10),
    "cifar-decay": (f"{MODELS}:cifar_decay", CIFAR10),
    "cifar-few": (f"{MODELS}:cifar_few", CIFAR10),
    "digits-few": (f"{MODELS}:digits_few", None),
    "mnist": (f"{MODELS}:mnist_flat", str(MNIST)),
    "mnist-decay": (f"{MODELS}:mnist_decay", str(MNIST)),
    "bytes": (f"{MODELS.with_name('byte_transformer.py')}:byte_transformer", None),
}
Row = dict[str, Any]


@dataclass(frozen=True)
class Link:
    """A paper's network in bits a second, its model in megabytes, and its step time."""

    bandwidth: float
    megabytes: float
    step_seconds: float


LINKS = {
    # Asynchronous averaging: GoogLeNet over 1 Gbit/s; a merge on 4 workers takes 3.2 steps.
    "googlenet": Link(1e9, 26.5, 0.1),
    # SelSync: models over 5 Gbit/s, with the step times that follow from its Table I.
    "resnet101": Link(5e9, 178.2, 0.066),
    "transformer": Link(5e9, 431.4, 0.041),
}


@dataclass(frozen=True)
class Setting:
    """A task on a link: the settings that the runs of one comparison share."""

    task: str
    link: str
    workers: int
    epochs: float
    evaluations: int

    @property
    def job(self) -> Job:
        """The job of all runs."""
        recipe, data = TASKS[self.task]
        return Job(
            recipe,
            workers=self.workers,
            epochs=self.epochs,
            data=data,
            evaluations=self.evaluations,
        )

    @property
    def cluster(self) -> VirtualCluster:
        """The simulated workers."""
        link = LINKS[self.link]
        model = find_recipe(self.job.recipe).build(self.job.setup()).model
        model_bytes = 4 * sum(one.numel() for one in model.parameters())
        network = Network(link.bandwidth * model_bytes / (1e6 * link.megabytes), latency="100us")
        return VirtualCluster(network, Compute(link.step_seconds, jitter=JITTER))

    def run(self, methods: Sequence[str], seeds: int) -> dict[str, list[Result]]:
        """Run what is missing; see ``compare_in``."""
        name = f"papers-{self.task}-{self.link}-{self.workers}workers-{self.epochs:g}epochs"
        return compare_in(name, self.job, methods, seeds, self.cluster)


def compare_in(
    name: str, job: Job, methods: Sequence[str], seeds: int, cluster: VirtualCluster
) -> dict[str, list[Result]]:
    """Run what ``results/NAME.jsonl`` lacks, and return the runs of each method, one per seed."""
    results = compare(
        job,
        methods,
        seeds=seeds,
        runner=cluster,
        output=RESULTS / f"{name}.jsonl",
        on_start=lambda job: print(f"{name}  {job.label}  seed {job.seed}", flush=True),
        on_event=lambda event: None,
    )
    found = {method: by_seed(results, Job("").under(method).label) for method in methods}
    return {method: [runs[seed] for seed in range(seeds)] for method, runs in found.items()}


def kept(
    name: str, wanted: Sequence[Mapping[str, Any]], function: Callable[..., Mapping[str, Any]]
) -> list[Row]:
    """Call ``function`` with each of these arguments, unless the results have it already.

    Each result is appended to ``results/papers-NAME.jsonl`` as it arrives, so that an interrupted
    study continues. A returned row has the arguments as ``run``, and the results.
    """
    path = RESULTS / f"papers-{name}.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    found = []
    for run in wanted:
        row = next((one for one in rows if one["run"] == run), None)
        if row is None:
            print(f"papers-{name}  {run}", flush=True)
            row = {"run": dict(run), **function(**run)}
            with path.open("a") as file:
                file.write(json.dumps(row) + "\n")
        found.append(row)
    return found


def grouped(
    rows: Sequence[Row], *keys: str, field: str = "run"
) -> dict[tuple[Any, ...], list[Row]]:
    """Group rows by these keys of a field, in order, so that a group differs in its seeds only."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[field][key] for key in keys), []).append(row)
    return groups


def best_of(result: Result) -> float:
    """Return the highest metric of a run."""
    return max(point.metric for point in result.points)


def spread(values: Sequence[float], scale: float = 100.0, digits: int = 1) -> str:
    """Return median and range as text, in percent by default; or the only value."""
    low, middle, high = min(values), statistics.median(values), max(values)
    if len(values) == 1:
        return f"{scale * middle:.{digits}f}"
    return f"{scale * middle:.{digits}f} ({scale * low:.{digits}f}–{scale * high:.{digits}f})"


def speedup(values: Sequence[float | None]) -> str:
    """Return the median speed-up as text. None stands for a run that never arrives."""
    known = [one for one in values if one is not None]
    if not known:
        return "never"
    arrived = f", {len(known)} of {len(values)}" if len(known) < len(values) else ""
    return f"{statistics.median(known):.2f} ×{arrived}"


def save(name: str, data: dict[str, Any]) -> None:
    """Write the results of a figure."""
    full, path = {"simulated": True, **data, "machine": machine()}, RESULTS / f"papers-{name}.json"
    path.write_text(json.dumps(full, indent=None, separators=(",", ":")) + "\n")
    print(path)


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]], *, texts: int = 1) -> str:
    """Return a table. All columns but the first ``texts`` contain numbers.

    A column is left out if all its cells are "-", for example losses that were not recorded.
    """
    shown = [i for i in range(len(headings)) if any(row[i] != "-" for row in rows)]
    headings, *rows = ([row[i] for i in shown] for row in (headings, *rows))
    rule = "---|" * texts + "--:|" * (len(headings) - texts)
    lines = [f"| {' | '.join(row)} |" for row in (headings, *rows)]
    return "\n".join([lines[0], f"|{rule}", *lines[1:]])


@contextmanager
def small_figure(name: str, x: str, y: str, *, rows: int = 1, of: int = 1) -> Iterator[list[Any]]:
    """Yield axes to draw on, ``of`` in each row, and save them as ``docs/images/NAME.png``.

    One legend serves all axes whose legends are equal.
    """
    figure, axes = new_figure(4.8 * of, 3.6 * rows, dpi=100)
    axes.remove()
    every = list(figure.subplots(rows, of, squeeze=False).flat)
    for one in every:
        one.set(xlabel=x, ylabel=y)
        one.grid(alpha=0.3)
    yield every
    handles, labels = every[0].get_legend_handles_labels()
    if of > 1 and labels and all(one.get_legend_handles_labels()[1] == labels for one in every):
        figure.legend(handles, labels, loc="outside right center", fontsize="small")
    else:
        for one in every:
            if one.get_legend_handles_labels()[1]:
                one.legend(fontsize="small")
    figure.savefig(IMAGES / f"{name}.png")
