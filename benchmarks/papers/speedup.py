"""Asynchronous averaging, the headline: is the speed-up of 4 workers linear without loss?

The paper trains GoogLeNet on 4 machines over 1 Gbit/s: n times the rate after a linear warm-up, an
n-th of the steps, τ = 16. Here: small CNNs, links on which a merge takes as many steps, a warm-up
over the first tenth, then a cosine. The effect of n times a rate depends on the rate, so the rate
for one worker is the recipe's, or a quarter of it. The studies:

- ``speedup``: CIFAR-10, 1, 2 and 4 workers, 750 steps of each of 4 workers;
- ``speedup-long``: MNIST, 1 and 4 workers, 3,750 steps of each of 4 workers.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.papers.runs import SEEDS, Setting, markdown, small_figure, spread
from benchmarks.papers.runs import speedup as shown
from benchmarks.race.studies import at_rate
from offbeat_lab.report.plots import colours_of
from offbeat_lab.results import Result

METHODS = {
    "BSP": "bsp",
    "cyclic, τ = 16": "async:staleness=16",
    "eager, τ = 16": "async:staleness=16,schedule=eager",
    "Downpour": "downpour",
    "EASGD, period 16": "easgd:period=16",
}
DRAWN = [*METHODS][:3]  # methods in the picture


@dataclass(frozen=True)
class Study:
    """A task, and what is tried on it.

    Attributes:
        task: Name of the task.
        epochs: Number of passes over the data, by all workers together.
        workers: Numbers of workers to compare with one.
        rates: Learning rates of one worker, as multiples of the recipe's.
        of_one: Share of one worker's final accuracy that is the target.
    """

    task: str
    epochs: float
    workers: tuple[int, ...]
    rates: tuple[float, ...]
    of_one: float


STUDIES = {
    "": Study("cifar-decay", 6.0, (2, 4), (0.25, 1.0), 0.97),
    "long": Study("mnist-decay", 8.0, (4,), (0.25,), 0.997),
}
"""Variant → study."""
Runs = Mapping[int, Mapping[str, Sequence[Result]]]
"""Number of workers → method → its runs."""


def run(study: Study, seeds: int) -> Runs:
    """Run one worker, then several with each method, at each rate."""
    found = {}
    for workers in (1, *study.workers):
        methods = ["bsp"] if workers == 1 else [*METHODS.values()]
        setting = Setting(
            study.task, "googlenet", workers, study.epochs, evaluations=32 if workers == 1 else 24
        )
        scaled = [at_rate(one, workers * rate) for rate in study.rates for one in methods]
        found[workers] = setting.run(scaled, seeds)
    return found


def facts(study: Study, runs: Runs) -> list[dict[str, Any]]:
    """Return accuracies, throughput and time to the target of each setting, against one worker."""
    found = []
    for rate in study.rates:
        ones = runs[1][at_rate("bsp", rate)]
        finals = [one.final for one in ones]
        target = study.of_one * statistics.median(finals)
        alone = statistics.median(one.seconds_to(target) or float("inf") for one in ones)
        step = statistics.median(one.mean_step_seconds for one in ones)
        found.append(
            {"rate": rate, "workers": 1, "method": "one worker", "finals": finals}
            | {"losses": [one.final_metrics["loss"] for one in ones]}
            | {"throughput": 1.0, "speedups": [1.0], "idle": 0.0, "target": target}
        )
        for n in study.workers:
            for name, method in METHODS.items():
                own = runs[n][at_rate(method, n * rate)]
                times = [one.seconds_to(target) for one in own]
                found.append(
                    {
                        "rate": rate,
                        "workers": n,
                        "method": name,
                        "finals": [one.final for one in own],
                        "losses": [one.final_metrics["loss"] for one in own],
                        "throughput": n
                        * step
                        / statistics.median(one.mean_step_seconds for one in own),
                        "speedups": [None if one is None else alone / one for one in times],
                        "idle": statistics.median(one.idle or 0.0 for one in own),
                        "target": target,
                    }
                )
    return found


def table(data: dict[str, Any]) -> str:
    """Return the table as Markdown."""
    headings = ("rate for one", "workers", "method", "accuracy at the end, %", "loss", "samples/s")
    rows = [
        [
            f"{0.02 * one['rate']:g}",
            f"{one['workers']}",
            one["method"],
            spread(one["finals"]),
            spread(one["losses"], 1, 2) if "losses" in one else "-",  # older results have none
            f"{one['throughput']:.2f} ×",
            "-" if one["workers"] == 1 else shown(one["speedups"]),
            f"{100 * one['idle']:.0f} %",
        ]
        for one in data["facts"]
    ]
    return markdown([*headings, "speed-up to the target", "idle"], rows, texts=3)


def measure(seeds: int = SEEDS, variant: str = "") -> dict[str, Any]:
    """Return the data of a study, and the curves of its first rate and seed."""
    study = STUDIES[variant]
    runs, rate = run(study, seeds), study.rates[0]
    most = max(study.workers)
    curves = {"one worker": runs[1][at_rate("bsp", rate)][0]} | {
        f"{most} workers, {one}": runs[most][at_rate(method, most * rate)][0]
        for one, method in METHODS.items()
        if one in DRAWN
    }
    points = {label: one.points for label, one in curves.items()}
    return {
        "facts": facts(study, runs),
        "rows": [{"steps": one[-1].step} for one in points.values()],
        "curves": {label: [(p.seconds, p.metric) for p in one] for label, one in points.items()},
    }


def draw(data: dict[str, Any]) -> None:
    """Draw the accuracy against time."""
    with small_figure("papers-speedup", "seconds (simulated)", "test accuracy, %") as (axes,):
        colours = colours_of(["ideal", "bsp", "async", "async, eager"])  # grey: one worker
        for (label, points), colour in zip(data["curves"].items(), colours, strict=True):
            axes.plot([p[0] for p in points], [100 * p[1] for p in points], c=colour, label=label)
        axes.set_xscale("log")
        axes.set_title("CIFAR-10, 1 Gbit/s scaled to the model", fontsize="medium")
