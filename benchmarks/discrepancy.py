"""How far the workers drift apart: AsyncAveraging against gradient delay.

For each staleness τ and number of workers N real processes train the small CNN of the ``digits``
recipe with plain SGD under ``AsyncAveraging(staleness=τ)``. The figure is the mean over workers,
and over the merges of the second half, of ‖x_n − mean(x)‖ at the end of a cycle.

Next to it the same distance for gradient delay at its worst (a parameter server whose N workers
come one after the other): worker k starts from a model k gradients newer and takes one gradient;
the mean distance to the newest. At the same learning rate, along one trajectory.

Writes ``results/discrepancy.json`` and ``results/discrepancy.png``.
"""

import json
import math
import statistics
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader

import offbeat
from benchmarks.harness import RESULTS, Result, machine
from benchmarks.processes import run
from offbeat.data import SelDPSampler
from offbeat.lab.recipes import digits
from offbeat.lab.recipes.base import TensorData

STALENESS = (2, 4, 8, 16, 32)
WORKERS = (2, 4, 8, 16)
LEARNING_RATE = 0.02
STEPS = 256


def batches(workers: int, rank: int, seed: int) -> Any:
    """Batches of 32, epoch after epoch."""
    x, y, *_ = digits.load()
    data = TensorData(x, y)
    sampler = SelDPSampler(data, workers, rank, seed=seed)
    grouped = BatchSampler(sampler, 32, drop_last=True)
    loader = DataLoader(data, batch_size=None, sampler=grouped)
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def gradient(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    """g into the parameters' ``grad``."""
    model.zero_grad()
    nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()


def measure(steps: int, seeds: int) -> dict[str, float]:
    """Runs on every worker: τ → distance."""
    found = {}
    for staleness in STALENESS:
        each = []
        for seed in range(seeds):
            torch.manual_seed(seed)
            model = digits.make_model()
            optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
            strategy = offbeat.AsyncAveraging(staleness=staleness, discrepancy_every=1)
            sync = offbeat.attach(model, optimizer, strategy)
            stream = batches(sync.size, sync.rank, seed)
            for _ in range(steps):
                gradient(model, next(stream))
                optimizer.step()
            distances = sync.stats.details["discrepancies"]
            each.append(statistics.fmean(distances[len(distances) // 2 :]))
            sync.finish()
        found[str(staleness)] = statistics.fmean(each)
    dist.barrier()
    return found


def gradient_delay(workers: int, steps: int, seeds: int) -> float:
    """Mean distance to the newest of N models that each are one gradient newer than the last."""
    each = []
    for seed in range(seeds):
        torch.manual_seed(seed)
        model = digits.make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        stream = batches(1, 0, seed)
        own: list[Tensor] = []  # the models of workers 0, 1, … after their own gradient
        for step in range(steps):
            gradient(model, next(stream))
            optimizer.step()
            own.append(nn.utils.parameters_to_vector(model.parameters()).detach().clone())
            own = own[-workers:]
            if step >= steps // 2 and step % workers == 0:
                each += [float((one - own[-1]).norm()) for one in own]
    return statistics.fmean(each)


def slope(xs: list[float], ys: list[float]) -> float:
    """d log y / d log x by least squares: 0 is flat, 1 is linear."""
    return statistics.linear_regression([math.log(x) for x in xs], [math.log(y) for y in ys])[0]


def draw(data: dict[str, Any]) -> None:
    """The figure: against τ for each N, and against N for each τ with gradient delay."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    table, delay = data["async"], data["gradient_delay"]
    for workers in WORKERS:
        values = [table[str(workers)][str(t)] for t in STALENESS]
        left.plot(STALENESS, values, "o-", label=f"N = {workers}")
    for staleness in STALENESS:
        values = [table[str(n)][str(staleness)] for n in WORKERS]
        right.plot(WORKERS, values, "o-", label=f"τ = {staleness}")
    right.plot(WORKERS, [delay[str(n)] for n in WORKERS], "ks--", label="gradient delay, worst")
    left.set(xlabel="staleness τ", ylabel="mean distance", title="grows with the staleness")
    right.set(xlabel="workers N", title="does not grow with the workers")
    for axes, ticks in ((left, STALENESS), (right, WORKERS)):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(RESULTS / "discrepancy.png", dpi=120)
    plt.close(figure)


def results(*, quick: bool = False) -> list[Result]:
    """Slopes on log-log axes, with the table behind them."""
    steps, seeds = (96, 1) if quick else (STEPS, 3)
    data: dict[str, Any] = {"learning_rate": LEARNING_RATE, "steps": steps, "seeds": seeds}
    data["async"] = {
        str(n): run(measure, workers=n, seconds=900, steps=steps, seeds=seeds)[0] for n in WORKERS
    }
    data["gradient_delay"] = {str(n): gradient_delay(n, 2 * steps, seeds) for n in WORKERS}
    data["machine"] = machine()
    by_staleness = [
        slope(list(STALENESS), [data["async"][str(n)][str(t)] for t in STALENESS]) for n in WORKERS
    ]
    by_workers = [
        slope(list(WORKERS), [data["async"][str(n)][str(t)] for n in WORKERS]) for t in STALENESS
    ]
    delay = slope(list(WORKERS), [data["gradient_delay"][str(n)] for n in WORKERS])
    data["slopes"] = {"staleness": by_staleness, "workers": by_workers, "delay_workers": delay}
    if not quick:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "discrepancy.json").write_text(json.dumps(data, indent=1) + "\n")
        draw(data)
    config = {"steps": steps, "seeds": seeds}
    return [
        Result("discrepancy", f"log-log slope of the distance, {what}", value, None, "", config)
        for what, value in (
            ("async against τ (mean over N)", statistics.fmean(by_staleness)),
            ("async against N (mean over τ)", statistics.fmean(by_workers)),
            ("gradient delay against N", delay),
        )
    ]
