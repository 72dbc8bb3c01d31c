"""SelSync, Figure 3: densities of the gradients of one layer, early and late in a run.

One worker trains the CNN of ``convergence`` on CIFAR-10, and the byte transformer of
``transformer``. The paper has layers of ResNet-101 and of its Transformer. At some shares of the
run, the gradients of one layer are taken on the same batches. A density has their spread (standard
deviation), and a histogram over four spreads to both sides.
"""

import statistics
from typing import Any

import torch

from benchmarks.papers.runs import SEEDS, TASKS, Row, grouped, kept, small_figure
from offbeat_lab.job import Job
from offbeat_lab.recipes import find_recipe
from offbeat_lab.samplers import Batches

LAYERS = {
    "cifar": ("2.weight", 4.0, "second convolution of the CNN"),
    "bytes": ("blocks.1.linear1.weight", 0.33, "second block of the transformer"),
}
"""Task → name of the layer, passes over the data, and a description of the layer."""
SHARES = (0.0, 0.25, 0.5, 1.0)
BATCHES, BINS, WIDTH = 10, 81, 4.0


def layer(*, task: str, seed: int) -> Row:
    """Return the density of the layer's gradients at each of ``SHARES``."""
    (name, files), (weight_name, passes, _) = TASKS[task], LAYERS[task]
    job = Job(name, "bsp", 1, epochs=passes, seed=seed, data=files)
    torch.manual_seed(seed)
    built = find_recipe(name).build(job.setup())
    weight = built.model.get_parameter(weight_name)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(built.samples), generator=generator)
    fixed = order[: built.batch_size * BATCHES].view(BATCHES, -1)

    def now() -> dict[str, Any]:
        batches = (built.samples.batch(one) for one in fixed.tolist())
        losses = (built.loss(built.model, batch) for batch in batches)
        found = torch.cat([torch.autograd.grad(one, weight)[0].flatten() for one in losses])
        most = WIDTH * float(found.std())
        return {"spread": float(found.std()), "counts": found.histc(BINS, -most, most).tolist()}

    looks = [now()]
    due = [round(share * built.steps) for share in SHARES]
    for step, batch in enumerate(Batches(built, job.sampler_for(built, 0)), start=1):
        built.loss(built.model, batch).backward()
        built.optimizer.step()
        built.advance()
        if step in due:
            looks.append(now())
    return {"looks": looks}


def spreads(data: dict[str, Any], task: str) -> list[float]:
    """Return the spread at each of ``SHARES``, medians over the seeds."""
    rows = grouped(data["layers"], "task")[(task,)]
    return [
        statistics.median(row["looks"][i]["spread"] for row in rows) for i in range(len(SHARES))
    ]


def measure(seeds: int = SEEDS) -> dict[str, Any]:
    """Return the densities of each layer and seed."""
    wanted = [{"task": task, "seed": seed} for seed in range(seeds) for task in LAYERS]
    return {"layers": kept("gradients", wanted, layer)}


def draw(data: dict[str, Any]) -> None:
    """Draw the densities of the first seed."""
    with small_figure(
        "papers-gradients", "gradient, thousandths", "density", of=len(LAYERS)
    ) as every:
        for axes, (task, (_, _, title)) in zip(every, LAYERS.items(), strict=True):
            looks = grouped(data["layers"], "task")[(task,)][0]["looks"]
            for share, look in zip(SHARES, looks, strict=True):
                most = WIDTH * 1000 * look["spread"]
                width = 2 * most / BINS
                xs = [-most + (i + 0.5) * width for i in range(BINS)]
                total = sum(look["counts"]) * width
                ys = [count / total for count in look["counts"]]
                axes.plot(xs, ys, label=f"after {100 * share:.0f} % of the run")
            axes.set_title(title, fontsize="medium")
            axes.set_yscale("log")
