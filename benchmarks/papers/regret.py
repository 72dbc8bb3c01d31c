"""Asynchronous averaging, the theorem: regret on a convex problem, against T and τ.

The paper proves regret O(τ² + √(τT)), so an average regret of O(τ²/T + √(τ/T)). Here: logistic
regression with batches of one sample, 4 workers, cyclic schedule, plain SGD at the constant rate
c/√T. The average regret is the mean over workers and steps of F(x_n,t) − F(x*), where F is the loss
over all samples and x* its minimum by Newton's method. Slopes are of log regret against log T.

For comparison: a *sequential* run, one worker with T steps; and batches of τ samples, with which
the variance of a gradient falls as 1/τ. The paper's bound is then O(τ² + √T), so the regret should
not depend on τ once T is large.
"""

import math
import statistics
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import offbeat
from benchmarks.papers.discrepancy import slope
from benchmarks.papers.runs import SEEDS, Row, grouped, kept, small_figure

WORKERS = 4
STEPS = (64, 256, 1024)
STALENESS = (2, 8, 32)
RATE = 2.0  # c
SAMPLES, WIDTH, RIDGE = 512, 20, 1e-3


def problem(seed: int) -> tuple[Tensor, Tensor]:
    """Return Gaussian inputs, and labels of −1 and 1 with noise."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64)
    truth = torch.randn(WIDTH, generator=generator, dtype=torch.float64)
    noise = torch.randn(SAMPLES, generator=generator, dtype=torch.float64)
    return x, torch.sign(x @ truth + 2 * noise)


def loss(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    """Return the logistic loss with a small ridge, which makes the minimum unique."""
    return nn.functional.softplus(-y * (x @ w)).mean() + RIDGE / 2 * (w @ w)


def minimum(x: Tensor, y: Tensor) -> tuple[Tensor, float]:
    """Return the minimum and its loss, by Newton's method with derivatives written out."""
    w = torch.zeros(x.shape[1], dtype=x.dtype)
    for _ in range(50):
        wrong = torch.sigmoid(-y * (x @ w))
        gradient = -(x * (y * wrong)[:, None]).mean(0) + RIDGE * w
        if gradient.norm() < 1e-12:
            break
        curved = (x * (wrong * (1 - wrong))[:, None]).T @ x / len(x)
        w = w - torch.linalg.solve(curved + RIDGE * torch.eye(len(w), dtype=w.dtype), gradient)
    return w, float(loss(x, y, w))


def regret(
    steps: int, staleness: int, seed: int, *, workers: int = WORKERS, batch: int = 1
) -> float:
    """Return the average regret of a run."""
    x, y = problem(seed)
    _, best = minimum(x, y)
    rate = RATE / math.sqrt(steps)

    def worker() -> float:
        w = nn.Parameter(torch.zeros(WIDTH, dtype=torch.float64))
        model = nn.ParameterList([w])
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
        chosen = torch.randint(SAMPLES, (steps, batch), generator=generator)
        total = 0.0
        with offbeat.attach(model, optimizer, offbeat.AsyncAveraging(staleness=staleness)):
            for few in chosen:
                with torch.no_grad():
                    total += float(loss(x, y, w)) - best
                optimizer.zero_grad()
                loss(x[few], y[few], w).backward()
                optimizer.step()
        return total / steps

    return statistics.fmean(offbeat.simulate(worker, workers=workers, seed=seed).results)


def one_run(**run: int) -> Row:
    """Return the average regret of a run as a row."""
    return {"regret": regret(**run)}


def measure(seeds: int = SEEDS) -> dict[str, Any]:
    """Return the regret of each kind of run, staleness, number of steps and seed, and its slopes.

    With one worker, asynchronous averaging is sequential SGD for any staleness.
    """
    kinds = {
        "regret": [(staleness, WORKERS, 1) for staleness in STALENESS],
        "less noise": [(staleness, WORKERS, staleness) for staleness in STALENESS],
        "sequential": [(min(STALENESS), 1, 1)],
    }
    found: dict[str, Any] = {}
    for kind, chosen in kinds.items():
        wanted = [
            {"steps": t, "staleness": tau, "workers": n, "batch": b, "seed": seed}
            for tau, n, b in chosen
            for t in STEPS
            for seed in range(seeds)
        ]
        rows = grouped(kept("regret", wanted, one_run), "staleness", "steps")
        found[kind] = {
            str(tau): {str(t): [row["regret"] for row in rows[tau, t]] for t in STEPS}
            for tau, _, _ in chosen
        }
    slopes = {
        staleness: [slope(STEPS, values) for values in zip(*rows.values(), strict=True)]
        for staleness, rows in found["regret"].items()
    }
    return {**found, "slopes": slopes}


def draw(data: dict[str, Any]) -> None:
    with small_figure("papers-regret", "steps T", "average regret") as (axes,):
        lines = [(f"τ = {tau}", "o-", rows) for tau, rows in data["regret"].items()]
        lines += [("sequential", "ks--", rows) for rows in data["sequential"].values()]
        for label, style, rows in lines:
            means = [statistics.fmean(rows[str(steps)]) for steps in STEPS]
            axes.plot(STEPS, means, style, label=label)
        first = statistics.fmean(data["regret"][str(STALENESS[0])][str(STEPS[0])])
        line = [first * math.sqrt(STEPS[0] / steps) for steps in STEPS]
        axes.plot(STEPS, line, "k:", label="1/√T")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks(STEPS, [str(steps) for steps in STEPS])
        axes.set_title("logistic regression, 4 workers, cyclic", fontsize="medium")
