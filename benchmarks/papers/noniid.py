"""SelSync, Figures 1b and 12: one label per worker, and what data injection recovers.

``mnist:cnn`` with ten workers that each have the images of one digit: local SGD, FedAvg and
SelSync, without and with data injection, against the bytes of models and samples that they send;
and BSP for comparison. All take the same number of steps with about the same batch.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness import IMAGES, MNIST
from benchmarks.papers.runs import Row, compare_in, grouped, markdown, spread
from offbeat.extend import new_figure
from offbeat.simulate import Compute, Network
from offbeat_lab.job import Job
from offbeat_lab.launch.runners import VirtualCluster
from offbeat_lab.report.plots import colours_of
from offbeat_lab.results import Result

INJECTIONS = (None, "0.5,0.5", "0.75,0.75")
FEDAVG = "fedavg:rounds_per_epoch=4,steps_per_epoch=94"
STRATEGIES = {
    "bsp": INJECTIONS[:1],
    "local:period=8": INJECTIONS,
    FEDAVG: INJECTIONS,
    "selsync:delta=0.05": INJECTIONS,
    "selsync:delta=0.3": INJECTIONS,
}
"""Strategy → data injections to try; the paper's FedAvg averages all workers."""
NAMES = {
    "bsp": "BSP",
    "local:period=8": "local SGD, period 8",
    FEDAVG: "FedAvg, all workers",
    "selsync:delta=0.05": "SelSync, δ = 0.05",
    "selsync:delta=0.3": "SelSync, δ = 0.3",
}
"""Strategy → its name in the figure."""
JOB = Job("mnist:cnn", workers=10, epochs=2, data=str(MNIST), evaluations=1, partition="label:1")
CLUSTER = VirtualCluster(Network("100Mbit/s", latency="100us"), Compute("10ms", jitter=0.2))


def methods() -> dict[str, tuple[str, str | None]]:
    """Return strategy and data injection of each method."""
    return {
        f"{strategy} --injection {injection}" if injection else strategy: (strategy, injection)
        for strategy, chosen in STRATEGIES.items()
        for injection in chosen
    }


def rows_of(runs: Mapping[str, Sequence[Result]]) -> list[Row]:
    """Return accuracy and bytes of each run."""
    return [
        {
            "job": {"strategy": strategy, "injection": injection, "seed": run.job.seed},
            "final": run.final,
            "lssr": run.lssr,
            "payload_bytes": run.payload_bytes,
            "sample_bytes": statistics.mean(
                stats.details.get("injected_bytes_sent", 0) for stats in run.stats
            ),
        }
        for method, (strategy, injection) in methods().items()
        for run in runs[method]
    ]


def megabytes(rows: Sequence[Row]) -> float:
    """Return the megabytes of models and samples that a worker sends, medians over the seeds."""
    return sum(
        float(statistics.median(row[key] for row in rows)) / 1e6
        for key in ("payload_bytes", "sample_bytes")
    )


def table(data: Mapping[str, Any]) -> str:
    """Return accuracy (median and range) and bytes of each strategy, with each data injection."""
    groups = grouped(data["skewed"], "strategy", "injection", field="job")
    lines = []
    for strategy in STRATEGIES:
        cells = [
            f"{spread([row['final'] for row in rows])}, {megabytes(rows):.1f} MB" if rows else ""
            for injection in INJECTIONS
            for rows in [groups.get((strategy, injection), [])]
        ]
        name = f"{NAMES[strategy]}, four rounds an epoch" if strategy == FEDAVG else f"`{strategy}`"
        lines.append([name, *cells])
    headings = ("strategy", "no injection", "α = β = 0.5", "α = β = 0.75")
    return markdown(headings, lines, texts=4)


def measure(seeds: int = 5) -> dict[str, Any]:
    """Return accuracy and bytes of all runs."""
    return {"skewed": rows_of(compare_in("papers-noniid", JOB, [*methods()], seeds, CLUSTER))}


def draw(data: Mapping[str, Any]) -> None:
    """Draw accuracy against bytes, a mark for each setting."""
    groups = grouped(data["skewed"], "strategy", "injection", field="job")
    figure, axes = new_figure(7, 4.5, dpi=120)
    marks = dict(zip(INJECTIONS, "os^", strict=True))
    colours = dict(zip(NAMES, colours_of(list(NAMES)), strict=True))
    for (strategy, injection), found in groups.items():
        finals = [100 * row["final"] for row in found]
        middle = statistics.median(finals)
        axes.errorbar(
            [megabytes(found)],
            [middle],
            yerr=[[middle - min(finals)], [max(finals) - middle]],
            fmt=marks[injection],
            color=colours[strategy],
            capsize=3,
            zorder=3 if strategy == "bsp" else 2,
        )
    axes.set(
        xscale="log",
        xlabel="MB sent by a worker: models and samples",
        ylabel="test accuracy, %",
        title="MNIST, ten workers with one digit each (simulated)",
    )
    named = [(NAMES[one], "o", colour) for one, colour in colours.items()]
    named += [("no injection", "o", "0.3"), ("injection, α = β = 0.5", "s", "0.3")]
    named += [("injection, α = β = 0.75", "^", "0.3")]
    for label, mark, colour in named:
        axes.plot([], [], mark, color=colour, label=label)
    axes.set_xticks([2, 5, 10, 20, 50, 100, 200], ["2", "5", "10", "20", "50", "100", "200"])
    figure.legend(loc="outside lower center", fontsize=8, frameon=False, ncols=3)
    figure.savefig(IMAGES / "noniid.png")
