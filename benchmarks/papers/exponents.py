"""Asynchronous averaging: why does the distance between workers grow as √τ here, and not as τ?

The problem and the protocol are those of ``discrepancy``, for 4 workers, with one setting changed
at a time: learning rate, momentum, and data of its own for each worker. Two
distances are measured just before a reset: from a local model to the mean of the local models, and
to the *common* model, from which all workers took their last τ local steps.
"""

import statistics
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import offbeat
from benchmarks.papers.discrepancy import (
    DIGITS,
    STALENESS,
    STEPS,
    Batch,
    Problem,
    flat,
    images,
    recording_worker,
    slope,
    to_mean,
)
from benchmarks.papers.runs import SEEDS, markdown, spread

WORKERS = 4
WHENS = ("early", "late")
KINDS = ("to the mean", "to the common model")


def own_labels(workers: int, rank: int, seed: int) -> Iterator[Batch]:
    """Yield batches of 32 digits whose label, modulo the number of workers, is the rank."""
    x, y = images()
    own = (y % workers == rank).nonzero().flatten()
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    while True:
        chosen = own[torch.randint(len(own), (32,), generator=generator)]
        yield x[chosen], y[chosen]


SETTINGS: dict[str, Problem] = {
    "as above": DIGITS,
    "rate × 0.25": replace(DIGITS, learning_rate=0.005),
    "rate × 5": replace(DIGITS, learning_rate=0.1),
    "momentum 0.9": replace(DIGITS, momentum=0.9),
    "labels of its own": replace(DIGITS, batches=own_labels),
}


def to_common(models: list[Tensor], common: Tensor) -> float:
    """Return the mean over workers of the distance to the common model."""
    return statistics.fmean(float((one - common).norm()) for one in models)


def distances(
    problem: Problem, *, workers: int, staleness: int, steps: int, seed: int
) -> dict[str, dict[str, float]]:
    """Return both distances, at the first reset and averaged over resets of the second half.

    At the end of cycle k, a local model is the common model plus the last two cycles of local
    steps. The common model is the mean of the local models at the end of cycle k − 2.
    """
    cycle = staleness // 2
    worker = recording_worker(
        problem,
        offbeat.AsyncAveraging(staleness=staleness),
        steps=steps,
        seed=seed,
        at=lambda step: step % cycle == 0,
    )
    results = offbeat.simulate(worker, workers=workers, seed=seed).results
    torch.manual_seed(seed)
    ends = [[flat(problem.model())], *map(list, zip(*results, strict=True))]
    means = [torch.stack(models).mean(0) for models in ends]
    late = [k for k in range(2, len(ends)) if k * cycle > steps // 2]
    return {
        "early": {
            "to the mean": to_mean(ends[2]),
            "to the common model": to_common(ends[2], means[0]),
        },
        "late": {
            "to the mean": statistics.fmean(to_mean(ends[k]) for k in late),
            "to the common model": statistics.fmean(to_common(ends[k], means[k - 2]) for k in late),
        },
    }


def of_seed(name: str, seed: int) -> dict[str, float]:
    """Return the exponent of τ for each distance."""
    found = [
        distances(SETTINGS[name], workers=WORKERS, staleness=staleness, steps=STEPS, seed=seed)
        for staleness in STALENESS
    ]
    return {
        f"{kind}, {when}": slope(STALENESS, [one[when][kind] for one in found])
        for kind in KINDS
        for when in WHENS
    }


def table(data: dict[str, Any]) -> str:
    """Return the exponents as Markdown: median and range over the seeds."""
    columns = [f"{kind}, {when}" for kind in KINDS for when in WHENS]
    rows = [
        [name, *(spread([run[column] for run in runs], 1, 2) for column in columns)]
        for name, runs in data["exponents"].items()
    ]
    return markdown(["setting", *columns], rows)


def measure(seeds: int = SEEDS) -> dict[str, Any]:
    """Return the exponents of each setting and seed."""
    return {"exponents": {name: [of_seed(name, n) for n in range(seeds)] for name in SETTINGS}}
