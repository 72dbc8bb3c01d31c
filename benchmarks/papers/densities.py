"""SelSync, Figures 3 and 11, as far as we know them: densities of gradients and of weights.

Figure 3: is the spread of a gradient's numbers large early in a run and small late? It is the norm
over √D, so the mean squared norms of ``curvature`` answer this.

Figure 11: are a worker's weights distributed as under BSP, if parameters are averaged, and if
gradients are? The CNN of ``discrepancy`` on ``digits``, 8 workers, with a δ at which few steps
synchronize. The distance between two densities is the first Wasserstein distance, ∫ |F⁻¹ − G⁻¹|, in
units of the spread of BSP's weights.

    python -m benchmarks.papers.densities
"""

import statistics
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

import offbeat
from benchmarks.papers.discrepancy import DIGITS, recording_worker
from benchmarks.papers.runs import save
from benchmarks.run_cache import spread
from offbeat import BSP, SelSync

NAME = "densities"
WORKERS, STEPS, LOOKS = 8, 480, (120, 240, 480)
PROBLEM = replace(DIGITS, learning_rate=0.05)
DELTAS = (0.1, 0.3)
SEEDS = (0, 1, 2)
AGGREGATES: tuple[Literal["parameters", "gradients"], ...] = ("parameters", "gradients")
NAMES = {f"{d:g} {what}": f"SelSync, δ = {d:g}, {what}" for d in DELTAS for what in AGGREGATES}
NAMES["another seed"] = "BSP under another seed"


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
    """Return distance to and spread over one worker's BSP model, means over the workers."""
    return [
        {
            "distance": statistics.fmean(wasserstein(x, like[0]) for x in own)
            / float(like[0].std()),
            "spread": statistics.fmean(float(x.std() / like[0].std()) for x in own),
        }
        for own, like in zip(models, synchronous, strict=True)
    ]


def measure(seed: int) -> dict[str, Any]:
    synchronous, _ = weights(BSP(), seed)
    found: dict[str, Any] = {}
    for delta in DELTAS:
        for what in AGGREGATES:
            models, lssr = weights(SelSync(delta=delta, aggregate=what), seed)
            found[f"{delta:g} {what}"] = {"lssr": lssr, "looks": compare(models, synchronous)}
    # BSP from another start on other batches: the distance between any two runs.
    others, _ = weights(BSP(), seed + 100)
    found["another seed"] = {"lssr": 0.0, "looks": compare(others, synchronous)}
    return found


def table(data: dict[str, Any]) -> str:
    """Return the distances to BSP's density in percent of its spread, medians of the seeds."""
    head = " | ".join(f"after {look} steps" for look in data["looks"])
    lines = [f"| run | LSSR | {head} |", f"|---|--:{'|--:' * len(data['looks'])}|"]
    for name in data["seeds"][0]:
        runs = [one[name] for one in data["seeds"]]
        lssr = statistics.median(one["lssr"] for one in runs)
        columns = zip(*(one["looks"] for one in runs), strict=True)
        cells = [spread([look["distance"] for look in column]) for column in columns]
        lines.append(f"| {NAMES[name]} | {lssr:.3f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    torch.set_num_threads(1)
    found = [measure(seed) for seed in SEEDS]
    data = {"workers": WORKERS, "looks": LOOKS, "deltas": DELTAS, "seeds": found}
    save(NAME, data)
    print(table(data))


if __name__ == "__main__":
    main()
