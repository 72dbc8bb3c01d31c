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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.papers.runs import (
    Run,
    by_method,
    cache_of,
    parser_for,
    percent,
    save,
    small_figure,
)
from benchmarks.run_cache import Row, arrival
from offbeat.display.plots import colours_of

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


def runs(study: Study, seeds: Sequence[int]) -> list[Run]:
    """Return the runs of one worker, then of several with each method, at each rate."""
    wanted = [("bsp", 1, rate) for rate in study.rates]
    wanted += [
        (method, n, rate)
        for rate in study.rates
        for n in study.workers
        for method in study.methods.values()
    ]
    return [
        Run(
            study.task,
            "googlenet",
            n,
            f"{method} --lr-scale {n * rate:g}",
            study.epochs,
            32 if n == 1 else 24,
            seed,
        )
        for seed in seeds
        for method, n, rate in wanted
    ]


def facts(study: Study, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return accuracies, throughput and time to the target of each setting, against one worker."""
    groups = by_method(rows, "workers", "method")
    found = []
    for rate in study.rates:
        ones = groups[1, f"bsp --lr-scale {rate:g}"]
        finals = [row["final"] for row in ones]
        target = study.of_one * statistics.median(finals)
        alone = statistics.median(seconds_to(row, target) or float("inf") for row in ones)
        pace = ones[0]["steps"] / statistics.median(row["seconds"] for row in ones)
        found.append(
            {"rate": rate, "workers": 1, "method": "one worker", "finals": finals}
            | {"throughput": 1.0, "speedups": [1.0], "idle": 0.0, "target": target}
        )
        for n in study.workers:
            for name, method in study.methods.items():
                own = groups.get((n, f"{method} --lr-scale {n * rate:g}"), [])
                if not own:  # not run
                    continue
                seconds = statistics.median(row["seconds"] for row in own)
                times = [seconds_to(row, target) for row in own]
                found.append(
                    {
                        "rate": rate,
                        "workers": n,
                        "method": name,
                        "finals": [row["final"] for row in own],
                        "throughput": n * own[0]["steps"] / seconds / pace,
                        "speedups": [None if one is None else alone / one for one in times],
                        "idle": statistics.median(row["idle"] for row in own),
                        "target": target,
                    }
                )
    return found


def seconds_to(row: Row, target: float) -> float | None:
    return arrival(row["points"], target)


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


def draw(data: dict[str, Any]) -> None:
    """Draw the accuracy against time, at the first rate and seed."""
    with small_figure(f"papers-{NAME}", "seconds (simulated)", "test accuracy, %") as axes:
        rate = STUDIES[NAME].rates[0]
        shown = {("one worker", 1): f"bsp --lr-scale {rate:g}"}
        shown |= {(k, n): f"{m} --lr-scale {n * rate:g}" for k, m in METHODS.items() for n in (4,)}
        colours = colours_of(["ideal", "bsp", "async", "async, eager"])  # grey: one worker
        for ((name, n), method), colour in zip(shown.items(), colours, strict=True):
            row = next(
                row
                for row in data["rows"]
                if (row["run"]["workers"], row["run"]["method"]) == (n, method)
            )
            xs, ys = ([one[key] for one in row["points"]] for key in ("seconds", "metric"))
            label = name if n == 1 else f"{n} workers, {name}"
            axes.plot(xs, [100 * y for y in ys], color=colour, label=label)
        axes.set_xscale("log")
        axes.set_title("CIFAR-10, 1 Gbit/s scaled to the model", fontsize="medium")


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--study", default=NAME, choices=STUDIES, help=f"default {NAME}")
    given = parser.parse_args()
    study = STUDIES[given.study]
    rows = cache_of("train").rows(runs(study, range(given.seeds)))
    data = {"epochs": study.epochs, "facts": facts(study, rows), "rows": rows}
    save(given.study, data)
    if given.study == NAME:
        draw(data)
    print(table(data))


if __name__ == "__main__":
    main()
