"""SelSync, Figures 3 and 11: densities of gradients and of weights.

Figure 3: the gradient of one layer, early and late in a run. One worker trains the CNN of
``convergence`` on CIFAR-10. After some epochs, the gradients of its second convolution are taken on
several batches. The width of their density is its spread (standard deviation).

Figure 11: are a worker's weights distributed as under BSP, if parameters are averaged, and if
gradients are? The CNN of ``discrepancy`` on ``digits``, 8 workers, with a δ at which few steps
synchronize. The distance between two densities is the first Wasserstein distance, ∫ |F⁻¹ − G⁻¹|, in
units of the spread of BSP's weights.
"""

import statistics
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import offbeat
from benchmarks.papers.discrepancy import DIGITS, recording_worker
from benchmarks.papers.gradients import AGGREGATES
from benchmarks.papers.runs import SEEDS, TASKS
from offbeat import BSP
from offbeat_lab.job import Job
from offbeat_lab.recipes import find_recipe
from offbeat_lab.samplers import Batches

WORKERS, STEPS, LOOKS = 8, 480, (120, 240, 480)
PROBLEM = replace(DIGITS, learning_rate=0.05)
DELTAS = (0.1, 0.3)
EPOCHS = (0, 1, 2, 4)
LAYER = "2.weight"  # the second convolution
GRADIENTS = 10  # batches whose gradients form a density


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


def layer(seed: int) -> list[dict[str, float]]:
    """Return the standard deviation of the layer's gradients after each of ``EPOCHS``."""
    name, files = TASKS["cifar"]
    job = Job(name, "bsp", 1, epochs=max(EPOCHS), seed=seed, data=files)
    task = find_recipe(name).build(job.setup())
    weight = task.model.get_parameter(LAYER)
    an_epoch = task.steps // max(EPOCHS)
    generator = torch.Generator().manual_seed(seed)
    fixed = torch.randperm(len(task.samples), generator=generator)[: 32 * GRADIENTS].view(-1, 32)

    def now() -> dict[str, float]:
        batches = (task.samples.batch(one) for one in fixed.tolist())
        losses = (task.loss(task.model, batch) for batch in batches)
        found = [torch.autograd.grad(loss, weight)[0].flatten() for loss in losses]
        return {"spread": float(torch.cat(found).std())}

    found = [now()]
    for step, batch in enumerate(Batches(task, job.sampler_for(task, 0)), start=1):
        task.loss(task.model, batch).backward()
        task.optimizer.step()
        task.advance()
        if step % an_epoch == 0 and step // an_epoch in EPOCHS:
            found.append(now())
    return found


def measure(seeds: int = SEEDS) -> dict[str, Any]:
    """Return the data of both figures."""
    return {
        "looks": LOOKS,
        "deltas": DELTAS,
        "layer": [layer(seed) for seed in range(seeds)],
        "seeds": [of_seed(seed) for seed in range(seeds)],
    }
