"""SelSync, Figure 11: densities of the workers' weights, against BSP's.

Do they differ if parameters are averaged, and if gradients are? The CNN of ``discrepancy`` on
``digits``, 8 workers, with a δ at which few steps synchronize. The distance between two densities
is the first Wasserstein distance, ∫ |F⁻¹ − G⁻¹|, in units of the spread of BSP's weights.
"""

import statistics
from dataclasses import replace
from typing import Any

from torch import Tensor

import offbeat
from benchmarks.papers.discrepancy import DIGITS, recording_worker
from benchmarks.papers.runs import SEEDS, kept
from offbeat import BSP, SelSync
from offbeat_lab import GradientSelSync

WORKERS, STEPS, LOOKS = 8, 480, (120, 240, 480)
PROBLEM = replace(DIGITS, learning_rate=0.05)
DELTAS = (0.1, 0.3)
AGGREGATES = {"gradients": GradientSelSync, "parameters": SelSync}


def wasserstein(first: Tensor, second: Tensor) -> float:
    """Return the mean distance between the k-th smallest numbers of two tensors of equal size."""
    return float((first.sort().values - second.sort().values).abs().mean())


def weights(strategy: offbeat.Strategy, seed: int) -> tuple[list[list[Tensor]], float]:
    """Return the workers' models at each of ``LOOKS``, and the LSSR."""
    worker = recording_worker(PROBLEM, strategy, steps=STEPS, seed=seed, at=LOOKS.__contains__)
    result = offbeat.simulate(worker, workers=WORKERS, seed=seed)
    stats = result.stats[0]
    assert stats is not None
    return [list(models) for models in zip(*result.results, strict=True)], stats.lssr


def compare(models: list[list[Tensor]], synchronous: list[list[Tensor]]) -> list[dict[str, float]]:
    """Return the mean distance to one worker's BSP model, in units of the spread of that model."""
    return [
        {
            "distance": statistics.fmean(wasserstein(x, like[0]) for x in own)
            / float(like[0].std()),
        }
        for own, like in zip(models, synchronous, strict=True)
    ]


def of_seed(seed: int) -> dict[str, Any]:
    """Return the distances of all strategies to BSP."""
    synchronous, _ = weights(BSP(), seed)
    found: dict[str, Any] = {}
    for delta in DELTAS:
        for what, kind in AGGREGATES.items():
            models, lssr = weights(kind(delta=delta), seed)
            found[f"{delta:g} {what}"] = {"lssr": lssr, "looks": compare(models, synchronous)}
    # BSP from another start on other batches: the distance between any two runs.
    others, _ = weights(BSP(), seed + 100)
    found["another seed"] = {"lssr": 0.0, "looks": compare(others, synchronous)}
    return found


def measure(seeds: int = SEEDS) -> dict[str, Any]:
    """Return the distances of all seeds."""
    return {
        "looks": LOOKS,
        "deltas": DELTAS,
        "seeds": [
            {name: row[name] for name in row if name != "run"}
            for row in kept("densities", [{"seed": seed} for seed in range(seeds)], of_seed)
        ],
    }


def at_the_end(data: dict[str, Any], name: str) -> float:
    """Return the median distance at the last look."""
    return statistics.median(run[name]["looks"][-1]["distance"] for run in data["seeds"])


def nearer(data: dict[str, Any]) -> str:
    """Return in how many comparisons means of parameters are nearer to BSP than of gradients."""
    found = [
        parameters["distance"] < gradients["distance"]
        for run in data["seeds"]
        for delta in data["deltas"]
        for parameters, gradients in zip(
            *(run[f"{delta:g} {what}"]["looks"] for what in ("parameters", "gradients")),
            strict=True,
        )
    ]
    return f"{sum(found)} of {len(found)}"
