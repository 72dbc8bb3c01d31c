"""SelSync, Figures 9 and 10: SelDP against DefDP, and averaging parameters against gradients.

Figure 9, with gradients as in the paper and with parameters, at the paper's δ = 0.25, on few images
and many passes: ``digits`` cut to 160 images, and the CNN on 1,600 images of CIFAR-10. Under DefDP,
a worker has 20 and 200 of them. Figure 10: the CNN of ``convergence`` with the paper's δ, and with
one that synchronizes more. 8 workers.
"""

import statistics
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

import offbeat
from benchmarks.papers.convergence import SETTINGS, WORKERS, selsync
from benchmarks.papers.gradients import AGGREGATES
from benchmarks.papers.runs import SEEDS, TASKS, Row, grouped, markdown, percent
from offbeat_lab.job import Job
from offbeat_lab.recipes import find_recipe
from offbeat_lab.samplers import Batches

SAMPLERS = ("seldp", "defdp")
PASSES = {"digits-few": 150.0, "cifar-few": 30.0}
DELTA = 0.25
AGGREGATED = (0.1, 0.3)


@dataclass(frozen=True)
class Rotated:
    """One run of Figure 9."""

    task: str
    aggregate: str
    sampler: str
    passes: float
    seed: int


def rotated(run: Rotated) -> Row:
    """Train; return the accuracy of the mean model, that of the workers' own models, and LSSR."""
    name, data = TASKS[run.task]
    recipe = find_recipe(name)
    job = Job(
        name, "bsp", WORKERS, epochs=run.passes, seed=run.seed, data=data, sampler=run.sampler
    )
    strategy = AGGREGATES[run.aggregate](delta=DELTA, smoothing=0.16, window=25)

    def worker() -> tuple[float, float]:
        task = recipe.build(job.setup())
        torch.manual_seed(1000 * run.seed + dist.get_rank())
        sync = offbeat.attach(task.model, task.optimizer, strategy)
        for batch in Batches(task, job.sampler_for(task, dist.get_rank())):
            task.loss(task.model, batch).backward()
            task.optimizer.step()
            task.advance()
        own = task.evaluate(task.model)[recipe.metric]
        sync.finish()
        return own, task.evaluate(task.model)[recipe.metric]

    result = offbeat.simulate(worker, workers=WORKERS, seed=run.seed)
    stats = result.stats[0]
    assert stats is not None
    return {
        "run": asdict(run),
        "own": statistics.fmean(own for own, _ in result.results),
        "mean": result.results[0][1],
        "lssr": stats.lssr,
    }


def rotated_table(data: dict[str, Any]) -> str:
    """Return the table of Figure 9."""
    headings = ("data", "averaged", "mean model: SelDP, %", "DefDP, %", "own models: SelDP, %")
    groups = grouped(data["rotated"], "task", "aggregate", "sampler")
    rows = []
    for task, aggregate in dict.fromkeys(key[:2] for key in groups):
        cells = [
            percent([row[key] for row in groups[task, aggregate, sampler]])
            for key in ("mean", "own")
            for sampler in SAMPLERS
        ]
        rows.append([f"`{task}`", aggregate, *cells])
    return markdown([*headings, "DefDP, %"], rows, texts=2)


def measure(seeds: int = SEEDS) -> dict[str, Any]:
    """Return the runs of Figure 9, and the accuracies of Figure 10."""
    pairs = {
        delta: [
            selsync(delta),
            selsync(delta, "benchmarks.papers.gradients:GradientSelSync"),
        ]
        for delta in AGGREGATED
    }
    runs = SETTINGS["cifar"].run([one for pair in pairs.values() for one in pair], seeds)
    return {
        "rotated": [
            rotated(Rotated(task, aggregate, sampler, passes, seed))
            for task, passes in PASSES.items()
            for aggregate in AGGREGATES
            for sampler in SAMPLERS
            for seed in range(seeds)
        ],
        "aggregated": [
            {
                "method": f"SelSync, δ = {delta}",
                "pair": [{"final": [run.final for run in runs[one]]} for one in pair],
            }
            for delta, pair in pairs.items()
        ],
    }
