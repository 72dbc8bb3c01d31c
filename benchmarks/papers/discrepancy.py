"""Asynchronous averaging, the main figure: how the local models drift apart, simulated.

**Asynchronous averaging**: N workers start from one model and take τ local steps. The distance is
the mean over workers of ‖x_n − mean(x)‖, just before the reset that ends these steps. Under
``AsyncAveraging(staleness=τ)`` this is the end of every cycle but the first, where x_n is the
merged model P and two cycles of τ/2 local steps. (Just *after* a reset only τ/2 local steps are
left.)

**Gradient delay, worst case**: worker k starts from a model that is k gradients newer than worker
0's, and each computes one gradient. The distance is the mean over workers to the newest model.

Both are measured at the first opportunity, when all gradients point in about the same direction,
and averaged over the second half of the run, when gradients are mostly noise. For comparison: equal
gradients move a worker by τ steps, independent ones by √τ; with gradient delay the mean distance is
then (N − 1)/2 steps, and (1/N)·Σ √k over k < N.

Real training of a small CNN on ``digits`` with plain SGD, in virtual time on one core, the same in
every run.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import offbeat
from benchmarks.papers.runs import SEEDS, Row, grouped, kept, small_figure
from offbeat import Strategy
from offbeat_lab.recipes import digits

STALENESS = (2, 4, 8, 16, 32)
WORKERS = (2, 4, 8, 16)
LEARNING_RATE = 0.02
STEPS = 128
MOST = 16  # resets measured in the second half
Batch = Any


@dataclass(frozen=True)
class Problem:
    """A training task with SGD.

    Attributes:
        model: Function that returns the model, the same on all workers.
        batches: Function (workers, rank, seed) → endless iterator of this worker's batches.
        loss: Function (model, batch) → loss.
        learning_rate: Learning rate.
        momentum: Momentum.
    """

    model: Callable[[], nn.Module]
    batches: Callable[[int, int, int], Iterator[Batch]]
    loss: Callable[[nn.Module, Batch], Tensor]
    learning_rate: float
    momentum: float = 0.0


def slim_cnn() -> nn.Module:
    """Return two convolutions and a linear layer, 3,818 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 10),
    )


@cache
def images() -> tuple[Tensor, Tensor]:
    x, y, *_ = digits.load()
    return x, y


def batches(workers: int, rank: int, seed: int) -> Iterator[Batch]:
    """Yield batches of 32 digits, each drawn independently from all images.

    Epochs would distort the distances: after τ = 32 steps two workers would have seen nearly the
    same of these 1437 images, and their sums of gradients would converge again.
    """
    x, y = images()
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    while True:
        chosen = torch.randint(len(x), (32,), generator=generator)
        yield x[chosen], y[chosen]


DIGITS = Problem(
    slim_cnn,
    batches,
    lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
    LEARNING_RATE,
)


def flat(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def recording_worker(
    problem: Problem, strategy: Strategy, *, steps: int, seed: int, at: Callable[[int], bool]
) -> Callable[[], list[Tensor]]:
    """Return a worker's function: it trains, and returns its models after the chosen local steps.

    A model is recorded before a reset in the same step.

    Args:
        problem: Training task.
        strategy: Strategy of the worker.
        steps: Number of local steps.
        seed: Seed of the model and the batches.
        at: Function of the step that is True where to record.
    """

    def worker() -> list[Tensor]:
        torch.manual_seed(seed)
        model = problem.model()
        optimizer = torch.optim.SGD(
            model.parameters(), lr=problem.learning_rate, momentum=problem.momentum
        )
        found: list[Tensor] = []
        step = 0

        def record(*_: object) -> None:
            nonlocal step
            step += 1
            if at(step):
                found.append(flat(model))

        # Registered before attach, so that it runs before the reset.
        optimizer.register_step_post_hook(record)
        stream = problem.batches(dist.get_world_size(), dist.get_rank(), seed)
        with offbeat.attach(model, optimizer, strategy):
            for _ in range(steps):
                optimizer.zero_grad()
                problem.loss(model, next(stream)).backward()
                optimizer.step()
        return found

    return worker


def distances(problem: Problem, *, workers: int, staleness: int, steps: int, seed: int) -> Row:
    """Return the distances to the mean before resets, early and late."""
    cycle = staleness // 2
    ends = range(2 * cycle, steps + 1, cycle)
    second = [end for end in ends if end > steps // 2]
    recorded_at = [ends[0], *second[:: max(1, len(second) // MOST)]]

    strategy = offbeat.AsyncAveraging(staleness=staleness)
    worker = recording_worker(
        problem, strategy, steps=steps, seed=seed, at=recorded_at.__contains__
    )
    taken = zip(*offbeat.simulate(worker, workers=workers).results, strict=True)
    first, *later = ([*models] for models in taken)
    return {"early": to_mean(first), "late": statistics.fmean(map(to_mean, later))}


def to_mean(models: Sequence[Tensor]) -> float:
    """Return the mean over workers of ‖x_n − mean(x)‖."""
    stacked = torch.stack(list(models))
    return float((stacked - stacked.mean(0)).norm(dim=1).mean())


def gradient_delay(problem: Problem, *, workers: int, steps: int, seed: int) -> Row:
    """Return the distances to the newest of N models, each one gradient newer, early and late."""
    torch.manual_seed(seed)
    model = problem.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=problem.learning_rate)
    stream = problem.batches(1, 0, seed)
    models: list[Tensor] = []  # of workers 0, 1, … after their gradient
    found = []
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        problem.loss(model, next(stream)).backward()
        optimizer.step()
        models = [*models[1 - workers :], flat(model)]
        if step == workers or (step > steps // 2 and step % workers == 0):
            found.append(statistics.fmean(float((one - models[-1]).norm()) for one in models))
    return {"early": found[0], "late": statistics.fmean(found[1:])}


def one_run(*, staleness: int | None, **run: int) -> Row:
    """Return the distances under asynchronous averaging; without a staleness, of gradient delay."""
    if staleness is None:
        return gradient_delay(DIGITS, **run)
    return distances(DIGITS, staleness=staleness, **run)


def slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Return d log y / d log x by least squares: 0 is constant, 1 is linear."""
    return statistics.linear_regression([math.log(x) for x in xs], [math.log(y) for y in ys])[0]


def equal_gradients(workers: int) -> float:
    """Return gradient delay's mean distance in steps for equal gradients: (N − 1)/2."""
    return (workers - 1) / 2


def independent_gradients(workers: int) -> float:
    """Return the same for independent gradients: (1/N)·Σ √k, k < N."""
    return statistics.fmean(math.sqrt(k) for k in range(workers))


def slopes(data: dict[str, Any], when: str) -> dict[str, list[float]]:
    """Return the slopes against τ (mean over N), against N (mean over τ) and delay, by seed."""
    found: dict[str, list[float]] = {"staleness": [], "workers": [], "delay_workers": []}
    for seed in range(data["seeds"]):

        def of(n: int, t: int, seed: int = seed) -> float:
            return float(data["async"][str(n)][str(t)][seed][when])

        against = [slope(STALENESS, [of(n, t) for t in STALENESS]) for n in WORKERS]
        found["staleness"].append(statistics.fmean(against))
        against = [slope(WORKERS, [of(n, t) for n in WORKERS]) for t in STALENESS]
        found["workers"].append(statistics.fmean(against))
        delayed = [data["gradient_delay"][str(n)][seed][when] for n in WORKERS]
        found["delay_workers"].append(slope(WORKERS, delayed))
    return found


def measure(seeds: int = SEEDS) -> dict[str, Any]:
    """Return all distances and slopes."""
    data: dict[str, Any] = {"learning_rate": LEARNING_RATE, "seeds": seeds, "steps": STEPS}
    wanted = [
        {"workers": n, "staleness": t, "steps": STEPS, "seed": seed}
        for n in WORKERS
        for t in (*STALENESS, None)
        for seed in range(seeds)
    ]
    rows = grouped(kept("discrepancy", wanted, one_run), "workers", "staleness")
    data["async"] = {str(n): {str(t): rows[n, t] for t in STALENESS} for n in WORKERS}
    data["gradient_delay"] = {str(n): rows[n, None] for n in WORKERS}
    data["slopes"] = {when: slopes(data, when) for when in ("early", "late")}
    return data


def draw(data: dict[str, Any]) -> None:
    """Draw the distances against τ and against N, early and late."""
    titles = {"early": "after the first τ steps", "late": "in the second half of the run"}
    with small_figure("discrepancy", "", "", rows=2, of=2) as every:
        for left, right, when in zip(every[::2], every[1::2], titles, strict=True):
            table = {
                (n, t): statistics.fmean(one[when] for one in data["async"][str(n)][str(t)])
                for n in WORKERS
                for t in STALENESS
            }
            each = (data["gradient_delay"][str(n)] for n in WORKERS)
            delay = [statistics.fmean(one[when] for one in seeds) for seeds in each]
            for n in WORKERS:
                left.plot(STALENESS, [table[n, t] for t in STALENESS], "o-", label=f"N = {n}")
            for t in STALENESS:
                right.plot(WORKERS, [table[n, t] for n in WORKERS], "o-", label=f"τ = {t}")
            right.plot(WORKERS, delay, "ks--", label="gradient delay, worst")
            for model, line, name in (
                (equal_gradients, "k:", "same gradients"),
                (independent_gradients, "k-.", "independent gradients"),
            ):
                unit = delay[0] / equal_gradients(WORKERS[0])
                right.plot(WORKERS, [unit * model(n) for n in WORKERS], line, lw=1, label=name)
            left.set(xlabel="staleness τ", ylabel="mean distance to the mean")
            right.set(xlabel="workers N")
            for axes, ticks, against in ((left, STALENESS, "τ"), (right, WORKERS, "N")):
                axes.set_title(f"against {against}, {titles[when]}", fontsize="medium")
                axes.set_xscale("log", base=2)
                axes.set_yscale("log", base=2)
                axes.set_ylim(top=1)  # room for the legend
                axes.set_xticks(ticks, [str(tick) for tick in ticks])
