"""Asynchronous averaging, the headline: is the speed-up of 4 workers linear without loss?

The paper trains GoogLeNet on 4 machines over 1 Gbit/s: n times the rate after a linear warm-up, an
n-th of the steps, τ = 16. Here: small CNNs, links on which a merge takes as many steps, a warm-up
over the first tenth, then a cosine. The effect of n times a rate depends on the rate, so the rate
for one worker is the recipe's, or a quarter of it. The studies:

- ``speedup``: CIFAR-10, 750 steps of each of 4 workers;
- ``speedup-long``: MNIST, 3,750 steps of each of 4 workers, with Downpour and EASGD;
- ``speedup-cifar-long``: CIFAR-10, 3,750 steps, with Downpour and EASGD; about half an hour.

    python -m benchmarks.papers.speedup --study speedup-long
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.papers.runs import Setting, parser_for, percent, save, small_figure
from offbeat_lab.report.plots import colours_of
from offbeat_lab.results import Result

NAME = "speedup"
METHODS = {
    "BSP": "bsp",
    "cyclic, τ = 16": "async:staleness=16",
    "eager, τ = 16": "async:staleness=16,schedule=eager",
}
SERVERS = {"Downpour": "downpour", "EASGD, period 16": "easgd:period=16"}


@dataclass(frozen=True)
class Study:
    """A task, and what is tried on it.

    Attributes:
        task: Name of the task.
        epochs: Number of passes over the data, by all workers together.
        workers: Numbers of workers to compare with one.
        rates: Learning rates of one worker, as multiples of the recipe's.
        methods: Methods by name.
        of_one: Share of one worker's final accuracy that is the target.
    """

    task: str
    epochs: float
    workers: tuple[int, ...]
    rates: tuple[float, ...]
    methods: dict[str, str]
    of_one: float


STUDIES = {
    NAME: Study("cifar-decay", 6.0, (2, 4), (0.25, 1.0), METHODS, 0.97),
    f"{NAME}-long": Study("mnist-decay", 8.0, (4,), (0.25,), METHODS | SERVERS, 0.997),
    f"{NAME}-cifar-long": Study("cifar-decay", 30.0, (4,), (0.25, 1.0), METHODS | SERVERS, 0.97),
}


Runs = Mapping[int, Mapping[str, Sequence[Result]]]
"""Number of workers → method → its runs."""


def run(study: Study, seeds: int) -> Runs:
    """Run one worker, then several with each method, at each rate."""
    found = {}
    for workers in (1, *study.workers):
        methods = ["bsp"] if workers == 1 else [*study.methods.values()]
        setting = Setting(
            study.task, "googlenet", workers, study.epochs, evaluations=32 if workers == 1 else 24
        )
        scaled = [at_rate(one, workers * rate) for rate in study.rates for one in methods]
        found[workers] = setting.run(scaled, seeds)
    return found


def at_rate(method: str, rate: float) -> str:
    return f"{method} --lr-scale {rate:g}"


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
            | {"throughput": 1.0, "speedups": [1.0], "idle": 0.0, "target": target}
        )
        for n in study.workers:
            for name, method in study.methods.items():
                own = runs[n][at_rate(method, n * rate)]
                times = [one.seconds_to(target) for one in own]
                found.append(
                    {
                        "rate": rate,
                        "workers": n,
                        "method": name,
                        "finals": [one.final for one in own],
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
    lines = [
        "| rate for one | workers | method | accuracy at the end, % | samples/s | "
        "speed-up to the target | idle |",
        "|--:|--:|---|--:|--:|--:|--:|",
    ]
    for one in data["facts"]:
        known = [each for each in one["speedups"] if each is not None]
        arrived = f", {len(known)} of {len(one['speedups'])}" * (len(known) < len(one["speedups"]))
        speedup = f"{statistics.median(known):.2f} ×{arrived}" if known else "never"
        lines.append(
            f"| {0.02 * one['rate']:g} | {one['workers']} | {one['method']} | "
            f"{percent(one['finals'])} | {one['throughput']:.2f} × | "
            f"{'-' if one['workers'] == 1 else speedup} | {100 * one['idle']:.0f} % |"
        )
    return "\n".join(lines)


def draw(runs: Runs) -> None:
    """Draw the accuracy against time, at the first rate and seed."""
    with small_figure(f"papers-{NAME}", "seconds (simulated)", "test accuracy, %") as axes:
        rate = STUDIES[NAME].rates[0]
        shown = {"one worker": runs[1][at_rate("bsp", rate)][0]}
        for name, method in METHODS.items():
            shown[f"4 workers, {name}"] = runs[4][at_rate(method, 4 * rate)][0]
        colours = colours_of(["ideal", "bsp", "async", "async, eager"])  # grey: one worker
        for (label, one), colour in zip(shown.items(), colours, strict=True):
            xs, ys = zip(
                *((point.seconds, 100 * point.metric) for point in one.points), strict=True
            )
            axes.plot(xs, ys, color=colour, label=label)
        axes.set_xscale("log")
        axes.set_title("CIFAR-10, 1 Gbit/s scaled to the model", fontsize="medium")


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--study", default=NAME, choices=STUDIES, help=f"default {NAME}")
    given = parser.parse_args()
    study = STUDIES[given.study]
    runs = run(study, given.seeds)
    data = {"epochs": study.epochs, "facts": facts(study, runs)}
    save(given.study, data)
    if given.study == NAME:
        draw(runs)
    print(table(data))


if __name__ == "__main__":
    main()
