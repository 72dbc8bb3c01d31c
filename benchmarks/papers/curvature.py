"""SelSync, Figure 4: does the gradient's variance follow the Hessian's largest eigenvalue?

One worker trains the CNN of ``discrepancy`` on ``digits`` with momentum. At steps that are evenly
spaced on a logarithmic scale it measures the Hessian's largest eigenvalue, by power iteration on
512 images; and over batches of 32 the gradients' variance (mean squared distance to their mean) and
mean squared norm, which SelSync's trigger smooths. Results are Spearman's rank correlations.
"""

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.papers.discrepancy import batches, images, slim_cnn
from benchmarks.papers.runs import small_figure

STEPS, POINTS = 600, 14
RATE, MOMENTUM = 0.02, 0.9
ITERATIONS, SAMPLES, BATCHES = 20, 512, 24


def gradient(loss: Tensor, parameters: Sequence[Tensor], *, graph: bool = False) -> Tensor:
    found = torch.autograd.grad(loss, list(parameters), create_graph=graph)
    return torch.cat([one.flatten() for one in found])


def largest_eigenvalue(
    loss: Tensor, parameters: Sequence[Tensor], *, iterations: int = ITERATIONS
) -> float:
    """Return the Hessian's eigenvalue of largest magnitude: Rayleigh quotient, power iteration."""
    g = gradient(loss, parameters, graph=True)
    v = torch.randn(g.shape, generator=torch.Generator().manual_seed(0), dtype=g.dtype)
    value = 0.0
    for _ in range(iterations):
        v = v / v.norm()
        found = torch.autograd.grad(g @ v, list(parameters), retain_graph=True)
        product = torch.cat([one.flatten() for one in found])
        value = float(v @ product)
        v = product
    return value


def spearman(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Return the rank correlation; all values must differ."""

    def ranks(values: Sequence[float]) -> list[int]:
        order = sorted(values)
        return [order.index(one) for one in values]

    return statistics.correlation(ranks(xs), ranks(ys))


def steps_to_measure() -> list[int]:
    """Return the steps after which to measure."""
    return sorted({round(math.exp(i * math.log(STEPS) / (POINTS - 1))) for i in range(POINTS)})


def of_seed(seed: int) -> list[dict[str, float]]:
    """Train, and return what is measured at each of the steps."""
    torch.manual_seed(seed)
    model = slim_cnn()
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=RATE, momentum=MOMENTUM)
    x, y = images()
    stream = batches(1, 0, seed)
    wanted, found = steps_to_measure(), []

    def loss_of(batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        loss_of(next(stream)).backward()
        optimizer.step()
        if step in wanted:
            fixed = loss_of((x[:SAMPLES], y[:SAMPLES]))
            some = batches(1, 999, seed)
            each = torch.stack([gradient(loss_of(next(some)), parameters) for _ in range(BATCHES)])
            found.append(
                {
                    "step": step,
                    "loss": float(fixed.detach()),
                    "eigenvalue": largest_eigenvalue(fixed, parameters),
                    "variance": float((each - each.mean(0)).pow(2).sum(1).mean()),
                    "squared_norm": float(each.pow(2).sum(1).mean()),
                }
            )
    return found


def correlations(points: Sequence[dict[str, float]]) -> dict[str, float]:
    values = [one["eigenvalue"] for one in points]
    return {
        key: spearman(values, [one[key] for one in points]) for key in ("variance", "squared_norm")
    }


def of_changes(points: Sequence[dict[str, float]]) -> float:
    """Return the rank correlation of the changes of eigenvalue and variance between points."""
    eigenvalues, variances = (
        [after[key] - before[key] for before, after in pairwise(points)]
        for key in ("eigenvalue", "variance")
    )
    return spearman(eigenvalues, variances)


def measure(seeds: int = 2) -> dict[str, Any]:
    """Return the measured points of all seeds, and their correlations."""
    points = [of_seed(seed) for seed in range(seeds)]
    return {"points": points, "correlations": [correlations(one) for one in points]}


def draw(data: dict[str, Any]) -> None:
    with small_figure("papers-curvature", "step", "relative to the run's largest") as (axes,):
        points = data["points"][0]
        for key, name in (
            ("eigenvalue", "Hessian's largest eigenvalue"),
            ("variance", "variance of gradients"),
        ):
            values = [one[key] for one in points]
            axes.plot(
                [one["step"] for one in points], [v / max(values) for v in values], "o-", label=name
            )
        axes.set_xscale("log")
        axes.set_title("a small CNN on digits, one worker", fontsize="medium")
