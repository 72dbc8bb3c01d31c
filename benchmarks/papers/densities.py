"""SelSync, Figures 3 and 11: densities of gradients and of weights.

Figure 3: the gradient of one layer, early and late in a run. One worker trains the CNN of
``convergence`` on CIFAR-10. After some epochs, the gradients of its second convolution are taken on
several batches. Their density is given by its spread (standard deviation) and by the interval that
holds the middle 90 % of the numbers.

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
from benchmarks.papers.runs import TASKS, parser_for, path_of, save, saved, spread
from offbeat import BSP, SelSync
from offbeat_lab.job import Job
from offbeat_lab.recipes import find_recipe
from offbeat_lab.samplers import Batches

NAME = "densities"
WORKERS, STEPS, LOOKS = 8, 480, (120, 240, 480)
PROBLEM = replace(DIGITS, learning_rate=0.05)
DELTAS = (0.1, 0.3)
EPOCHS = (0, 1, 2, 4)
LAYER = "2.weight"  # the second convolution
GRADIENTS = 10  # batches whose gradients form a density
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


def width(numbers: Tensor) -> dict[str, float]:
    """Return the standard deviation, and the length of the interval of the middle 90 %."""
    low, high = numbers.quantile(torch.tensor([0.05, 0.95])).tolist()
    return {"spread": float(numbers.std()), "middle": high - low}


def layer(seed: int) -> list[dict[str, float]]:
    """Return the width of the layer's density of gradients after each of ``EPOCHS``."""
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
        return width(torch.cat(found))

    found = [now()]
    for step, batch in enumerate(Batches(task, job.sampler_for(task, 0)), start=1):
        task.loss(task.model, batch).backward()
        task.optimizer.step()
        task.advance()
        if step % an_epoch == 0 and step // an_epoch in EPOCHS:
            found.append(now())
    return found


def layer_table(data: dict[str, Any]) -> str:
    """Return the widths in thousandths, medians of the seeds."""
    lines = [
        f"| gradients of the layer | {' | '.join(f'epoch {one}' for one in EPOCHS)} |",
        f"|---|{'--:|' * len(EPOCHS)}",
    ]
    for key, name in (("spread", "standard deviation"), ("middle", "width of the middle 90 %")):
        columns = zip(*data["layer"], strict=True)
        cells = [spread([one[key] for one in column], 1000, 2) for column in columns]
        lines.append(f"| {name}, in thousandths | {' | '.join(cells)} |")
    return "\n".join(lines)


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
    parser = parser_for(__doc__)
    parser.add_argument("--figures", default="3,11", help="of these, with commas between")
    given = parser.parse_args()
    torch.set_num_threads(1)
    data = saved(NAME) if path_of(NAME).exists() else {}
    data |= {"workers": WORKERS, "looks": LOOKS, "deltas": DELTAS, "epochs": EPOCHS}
    if "3" in given.figures.split(","):
        data["layer"] = [layer(seed) for seed in range(given.seeds)]
        print(layer_table(data))
    if "11" in given.figures.split(","):
        data["seeds"] = [measure(seed) for seed in range(given.seeds)]
        print(table(data))
    save(NAME, data)


if __name__ == "__main__":
    main()
