"""Asynchronous averaging, the main figure, for every method: distances between local models.

The problem and the protocol are those of ``discrepancy``, which has asynchronous averaging and
gradient delay only. After every τ-th local step, before the method acts, the mean over the workers
of ‖x_n − mean(x)‖ is measured. It grows with N as √(1 − 1/N) even where models are independent. The
mean of ‖x_n − x_m‖ over all pairs does not, and is measured, too. Results are means over the second
half of the run. τ is the staleness of asynchronous averaging, the period of local SGD and EASGD,
and the bound of SSP. A mean of the model takes 0.45 τ steps on the links, which also sets the age
of the parts of streaming averaging and of Downpour's updates.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import offbeat
from benchmarks.papers.discrepancy import DIGITS, Problem, recording_worker, slope, to_mean
from benchmarks.papers.runs import SEEDS, grouped, kept, markdown, small_figure
from offbeat import Compute, Network, Strategy
from offbeat_lab.methods.registry import parse_method
from offbeat_lab.report.plots import colours_of

WORKERS = (2, 4, 8)
STALENESS = (4, 16)
STEPS = 48
STEP_SECONDS, JITTER = 0.01, 0.1
METHODS = {
    "async": "async:staleness={staleness}",
    "async, eager": "async:schedule=eager,staleness={staleness}",
    "streaming": "streaming",
    "local SGD": "local:period={staleness}",
    "EASGD": "easgd:period={staleness}",
    "SSP": "ssp:staleness={staleness}",
    "Downpour": "downpour",
}
"""Name of a method → its text, for a staleness τ."""


def strategy(name: str, staleness: int) -> Strategy:
    """Return the strategy of a method."""
    method = parse_method(METHODS[name].format(staleness=staleness))
    assert isinstance(method, Strategy)
    return method


def bandwidth(parameters: int, workers: int, staleness: int) -> float:
    """Return the bits a second at which a ring's mean takes 0.45 τ steps, without latencies."""
    bits = 2 * (workers - 1) / workers * 32 * parameters
    return bits / (0.45 * staleness * STEP_SECONDS)


def distances(
    name: str,
    *,
    workers: int,
    staleness: int,
    seed: int,
    steps: int = STEPS,
    problem: Problem = DIGITS,
) -> dict[str, float]:
    """Return the mean distance of the workers' models to their mean, and of their pairs."""

    def at(step: int) -> bool:
        return step > steps // 2 and step % staleness == 0

    worker = recording_worker(problem, strategy(name, staleness), steps=steps, seed=seed, at=at)
    count = sum(one.numel() for one in problem.model().parameters())
    result = offbeat.simulate(
        worker,
        workers=workers,
        network=Network(bandwidth(count, workers, staleness), latency="10us"),
        compute=Compute(STEP_SECONDS, jitter=JITTER),
        seed=seed,
    )
    taken = [list(models) for models in zip(*result.results, strict=True)]
    return {
        "mean": statistics.fmean(map(to_mean, taken)),
        "pairs": statistics.fmean(map(of_pairs, taken)),
    }


def of_pairs(models: Sequence[Tensor]) -> float:
    """Return the mean of ‖x_n − x_m‖ over all pairs of workers."""
    return float(torch.pdist(torch.stack(list(models))).mean())


def measure(seeds: int = SEEDS) -> dict[str, Any]:
    """Return the distances of each method, staleness, number of workers and seed."""
    wanted = [
        {"name": name, "workers": n, "staleness": t, "seed": seed}
        for seed in range(seeds)
        for name in METHODS
        for t in STALENESS
        for n in WORKERS
    ]
    return {"steps": STEPS, "seeds": seeds, "distances": kept("distances", wanted, distances)}


def mean_of(
    data: dict[str, Any], name: str, staleness: int, workers: int, kind: str = "mean"
) -> float:
    """Return the mean distance over the seeds, to the mean or of pairs."""
    rows = grouped(data["distances"], "name", "staleness", "workers")[name, staleness, workers]
    return statistics.fmean(row[kind] for row in rows)


def slopes(data: dict[str, Any], name: str) -> tuple[float, float, float]:
    """Return the slope against N (mean over τ), that of pairs, and against τ (mean over N)."""

    def of(n: int, t: int, kind: str = "mean") -> float:
        return mean_of(data, name, t, n, kind) or math.nan

    over_n, pairs = (
        statistics.fmean(slope(WORKERS, [of(n, t, kind) for n in WORKERS]) for t in STALENESS)
        for kind in ("mean", "pairs")
    )
    over_t = statistics.fmean(slope(STALENESS, [of(n, t) for t in STALENESS]) for n in WORKERS)
    return over_n, pairs, over_t


def exponents(data: dict[str, Any]) -> str:
    """Return the exponents of the distances in N and in τ as Markdown."""
    rows = [
        [name, *(f"{one:.2f}".replace("-", "−") for one in slopes(data, name))] for name in METHODS
    ]
    return markdown(["method", "to the mean, in N", "of pairs, in N", "to the mean, in τ"], rows)


def draw(data: dict[str, Any]) -> None:
    with small_figure("papers-distances", "workers N", "mean distance to the mean", of=2) as axes:
        for one, staleness in zip(axes, STALENESS, strict=True):
            colours = colours_of([name.lower() for name in METHODS])
            for name, colour in zip(METHODS, colours, strict=True):
                values = [mean_of(data, name, staleness, n) for n in WORKERS]
                dash = "o--" if name == "local SGD" else "o-"  # the same values as async
                one.plot(WORKERS, values, dash, color=colour, label=name)
            one.set_xscale("log", base=2)
            one.set_yscale("log", base=2)
            one.set_xticks(WORKERS, [str(n) for n in WORKERS])
            one.set_title(f"τ = {staleness} (simulated)", fontsize="medium")
