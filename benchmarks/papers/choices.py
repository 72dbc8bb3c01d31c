"""SelSync, Figure 9: SelDP against DefDP, if gradients are averaged and if parameters are.

The paper's δ = 0.25, on few images and many passes: ``digits`` cut to 160 images, and the CNN on
1,600 images of CIFAR-10. Under DefDP, a worker has 20 and 200 of them. 8 workers.
"""

import math
import statistics
from typing import Any

import torch
import torch.distributed as dist

import offbeat
from benchmarks.papers.convergence import WORKERS
from benchmarks.papers.runs import SEEDS, TASKS, Row, grouped, kept, markdown, spread
from offbeat import SelSync
from offbeat_lab import GradientSelSync
from offbeat_lab.job import Job
from offbeat_lab.recipes import find_recipe
from offbeat_lab.samplers import Batches

SAMPLERS = ("seldp", "defdp")
PASSES = {"digits-few": 150.0, "cifar-few": 30.0}
AGGREGATES = {"gradients": GradientSelSync, "parameters": SelSync}
DELTA = 0.25


def rotated(
    *,
    task: str,
    aggregate: str,
    sampler: str,
    passes: float,
    seed: int,
    delta: float | None = DELTA,
) -> Row:
    """Train; return accuracy and loss of the mean model and of the local models, and LSSR.

    ``delta=None`` is a threshold that is never reached.
    """
    name, data = TASKS[task]
    recipe = find_recipe(name)
    job = Job(name, "bsp", WORKERS, epochs=passes, seed=seed, data=data, sampler=sampler)
    threshold = math.inf if delta is None else delta
    strategy = AGGREGATES[aggregate](delta=threshold, smoothing=0.16, window=25)

    def worker() -> tuple[dict[str, float], dict[str, float]]:
        built = recipe.build(job.setup())
        torch.manual_seed(1000 * seed + dist.get_rank())
        sync = offbeat.attach(built.model, built.optimizer, strategy)
        for batch in Batches(built, job.sampler_for(built, dist.get_rank())):
            built.loss(built.model, batch).backward()
            built.optimizer.step()
            built.advance()
        own = built.evaluate(built.model)
        sync.finish()
        return own, built.evaluate(built.model)

    result = offbeat.simulate(worker, workers=WORKERS, seed=seed)
    stats = result.stats[0]
    assert stats is not None
    mean = result.results[0][1]
    return {
        "own": statistics.fmean(own[recipe.metric] for own, _ in result.results),
        "own loss": statistics.fmean(own["loss"] for own, _ in result.results),
        "mean": mean[recipe.metric],
        "mean loss": mean["loss"],
        "lssr": stats.lssr,
    }


def rotated_table(data: dict[str, Any]) -> str:
    """Return the table of Figure 9."""
    headings = ("data", "averaged", "mean model: SelDP, %", "DefDP, %", "own models: SelDP, %")
    groups = grouped(data["rotated"], "task", "aggregate", "sampler")
    rows = []
    for task, aggregate in dict.fromkeys(key[:2] for key in groups):
        cells = [
            spread([row[key] for row in groups[task, aggregate, sampler]])
            for key in ("mean", "own")
            for sampler in SAMPLERS
        ]
        for sampler in SAMPLERS:
            found = [
                row["own loss"] for row in groups[task, aggregate, sampler] if "own loss" in row
            ]
            cells.append(spread(found, 1, 2) if found else "-")  # older results have no losses
        rows.append([f"`{task}`", aggregate, *cells])
    return markdown([*headings, "DefDP, %", "losses: SelDP", "DefDP"], rows, texts=2)


def measure(seeds: int = SEEDS) -> dict[str, Any]:
    """Return the runs of Figure 9."""
    wanted = [
        {"task": task, "aggregate": aggregate, "sampler": sampler, "passes": passes, "seed": seed}
        for task, passes in PASSES.items()
        for aggregate in AGGREGATES
        for sampler in SAMPLERS
        for seed in range(seeds)
    ]
    return {"rotated": kept("choices", wanted, rotated)}
