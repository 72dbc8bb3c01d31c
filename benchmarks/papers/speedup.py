"""Asynchronous averaging, the headline: is the speed-up of 2 and 4 workers linear without loss?

The paper trains GoogLeNet on 4 machines over 1 Gbit/s: n times the rate after a linear warm-up, an
n-th of the steps, τ = 16. Here: a small CNN on CIFAR-10, links on which a merge takes as many
steps, a warm-up over the first tenth, then a cosine; asynchronous averaging, cyclic and eager, and
BSP. The rate for one worker is the recipe's, or a quarter of it, because the effect of n times a
rate depends on the rate.

    python -m benchmarks.papers.speedup
"""

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.papers.runs import (
    Run,
    by_method,
    cache_of,
    percent,
    save,
    seeds_asked,
    small_figure,
)
from benchmarks.run_cache import Row, arrival

NAME = "speedup"
RATES = (0.25, 1.0)
METHODS = {
    "BSP": "bsp",
    "cyclic, τ = 16": "async:staleness=16",
    "eager, τ = 16": "async:staleness=16,schedule=eager",
}
WORKERS = (2, 4)
EPOCHS = 6.0
OF_ONE = 0.97
"""Share of one worker's final accuracy that is the target."""


def runs(seeds: Sequence[int]) -> list[Run]:
    """Return the runs of one worker, then of 2 and 4 with each method, at each rate."""
    wanted = [("bsp", 1, rate) for rate in RATES]
    wanted += [(m, n, rate) for rate in RATES for n in WORKERS for m in METHODS.values()]
    return [
        Run(
            "cifar-decay",
            "googlenet",
            n,
            f"{method} --lr-scale {n * rate:g}",
            EPOCHS,
            32 if n == 1 else 24,
            seed,
        )
        for method, n, rate in wanted
        for seed in seeds
    ]


def facts(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return accuracies, throughput and time to the target of each setting, against one worker."""
    groups = by_method(rows, "workers", "method")
    found = []
    for rate in RATES:
        ones = groups[1, f"bsp --lr-scale {rate:g}"]
        finals = [row["final"] for row in ones]
        target = OF_ONE * statistics.median(finals)
        alone = statistics.median(seconds_to(row, target) or float("inf") for row in ones)
        pace = ones[0]["steps"] / statistics.median(row["seconds"] for row in ones)
        found.append(
            {"rate": rate, "workers": 1, "method": "one worker", "finals": finals}
            | {"throughput": 1.0, "speedups": [1.0], "idle": 0.0, "target": target}
        )
        for n in WORKERS:
            for name, method in METHODS.items():
                own = groups[n, f"{method} --lr-scale {n * rate:g}"]
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
        "time to the target | idle |",
        "|--:|--:|---|--:|--:|--:|--:|",
    ]
    for one in data["facts"]:
        known = [each for each in one["speedups"] if each is not None]
        arrived = f", {len(known)} of {len(one['speedups'])}" * (len(known) < len(one["speedups"]))
        faster = f"{statistics.median(known):.2f} × faster{arrived}" if known else "never"
        lines.append(
            f"| {0.02 * one['rate']:g} | {one['workers']} | {one['method']} | "
            f"{percent(one['finals'])} | {one['throughput']:.2f} × | "
            f"{'-' if one['workers'] == 1 else faster} | {100 * one['idle']:.0f} % |"
        )
    return "\n".join(lines)


def draw(data: dict[str, Any]) -> None:
    """Draw the accuracy against time, at the first rate and seed."""
    with small_figure(f"papers-{NAME}", "seconds (simulated)", "test accuracy, %") as axes:
        rate = RATES[0]
        shown = {("one worker", 1): f"bsp --lr-scale {rate:g}"}
        shown |= {(k, n): f"{m} --lr-scale {n * rate:g}" for k, m in METHODS.items() for n in (4,)}
        for (name, n), method in shown.items():
            row = next(
                row
                for row in data["rows"]
                if (row["run"]["workers"], row["run"]["method"]) == (n, method)
            )
            xs, ys = ([one[key] for one in row["points"]] for key in ("seconds", "metric"))
            axes.plot(xs, [100 * y for y in ys], label=name if n == 1 else f"{n} workers, {name}")
        axes.set_xscale("log")
        axes.set_title("CIFAR-10, 1 Gbit/s scaled to the model", fontsize="medium")


def main() -> None:
    seeds = seeds_asked(__doc__)
    rows = cache_of("train").rows(runs(seeds))
    data = {"epochs": EPOCHS, "facts": facts(rows), "rows": rows}
    save(NAME, data)
    draw(data)
    print(table(data))


if __name__ == "__main__":
    main()
