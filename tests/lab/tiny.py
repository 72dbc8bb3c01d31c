"""A recipe of nine steps whose metric identifies the evaluated model, and slow references."""

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from offbeat_lab.recipes import RECIPES, Setup, Task
from offbeat_lab.recipes.base import Recipe
from offbeat_lab.recipes.datasets import TensorData
from offbeat_lab.recipes.held_out import HeldOut
from offbeat_lab.samplers import Batches, make_sampler

STEPS = 9
LR = 0.03
CLIP = 3.0  # clips the gradients of some steps
built: list[Task] = []  # by this process, in order
evaluation_seconds = 0.0
width = 32


def rate(step: int) -> float:
    """Return the factor of the schedule after ``step`` batches."""
    return 1 / (1 + step)


def size_of(tensors: Sequence[Tensor]) -> float:
    """Return a number that identifies the tensors."""
    flat = torch.cat([t.detach().double().reshape(-1) for t in tensors])
    return float((flat * torch.arange(1, len(flat) + 1)).sin().sum())


def scores(model: nn.Module, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
    time.sleep(evaluation_seconds)
    parameters, buffers = size_of([*model.parameters()]), size_of([*model.buffers()])
    alike = torch.ones(len(batch[0]), dtype=torch.float64)
    return {"size": parameters * alike, "statistics": buffers * alike}


def build(setup: Setup) -> Task:
    torch.manual_seed(setup.seed)
    data = torch.randn(96, 4, dtype=torch.float64)
    layers = nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Linear(width, 1)
    model = nn.Sequential(*layers).double()
    model.register_buffer("seen", torch.zeros(1, dtype=torch.float64))  # as in BatchNorm
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    task = Task(
        model=model,
        optimizer=optimizer,
        scheduler=lambda optimizer, _: torch.optim.lr_scheduler.LambdaLR(optimizer, rate),
        dataset=TensorData(data, data.sin().sum(1, keepdim=True)),
        batch_size=4,
        loss=loss,
        clip_norm=CLIP,
        steps=STEPS,
        evaluate=HeldOut(TensorData(data[:8], data[:8]), scores, batch_size=4),
    )
    task.complete(setup)
    built.append(task)
    return task


def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    inputs, targets = batch
    getattr(model, "module", model).seen += inputs.detach().sum()
    return nn.functional.mse_loss(model(inputs), targets)


RECIPE = Recipe("tiny", "nine steps", "size", True, 0.0, 1.0, build)


def install() -> None:
    """Register the recipe in a worker process."""
    RECIPES["tiny"] = RECIPE


# References


class Worker:
    """One worker of a reference. All workers are in one process."""

    def __init__(self, rank: int, workers: int, lr_scale: float = 1.0) -> None:
        task = build(Setup(workers, 1.0))
        self.model, self.lr_scale = task.model, lr_scale
        sampler = make_sampler(task, workers, rank, seed=0)
        self.batches: Iterator[Any] = iter(Batches(task, sampler))

    @property
    def parameters(self) -> list[Tensor]:
        return [*self.model.parameters()]

    def gradients(self) -> list[Tensor]:
        """Return the gradients of the next batch."""
        return [*torch.autograd.grad(loss(self.model, next(self.batches)), self.parameters)]

    def descend(self, gradients: Sequence[Tensor], step: int) -> None:
        """x ← x − lr·clip(g)."""
        norm = float(torch.sqrt(sum(((g**2).sum() for g in gradients), torch.zeros(()))))
        factor = LR * rate(step) * self.lr_scale * min(1.0, CLIP / (norm + 1e-6))  # as torch's
        with torch.no_grad():
            for parameter, gradient in zip(self.parameters, gradients, strict=True):
                parameter -= factor * gradient


def mean(lists: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    return [sum(one[1:], start=one[0]) / len(one) for one in zip(*lists, strict=True)]


def average(workers: Sequence[Worker]) -> None:
    parameters = mean([copy.deepcopy(one.parameters) for one in workers])
    with torch.no_grad():
        for one in workers:
            for parameter, value in zip(one.parameters, parameters, strict=True):
                parameter.copy_(value)


Curve = list[float]
"""``size_of`` the mean model after each step."""


def _curve(
    take: Callable[[list[Worker], int], None], workers: int = 2, lr_scale: float = 1.0
) -> Curve:
    replicas = [Worker(rank, workers, lr_scale) for rank in range(workers)]
    sizes = []
    for step in range(STEPS):
        take(replicas, step)
        sizes.append(size_of(mean([one.parameters for one in replicas])))
    return sizes


def mean_gradient(lr_scale: float = 1.0) -> Curve:
    """Return the curve of steps with the mean gradient."""

    def take(workers: list[Worker], step: int) -> None:
        gradients = mean([one.gradients() for one in workers])
        for one in workers:
            one.descend(gradients, step)

    return _curve(take, lr_scale=lr_scale)


def post_local(period: int, warmup_steps: int) -> Curve:
    """Return the curve of W steps with mean gradients, then local steps with means of the models.

    The means are after steps W+1, W+1+H, …
    """

    def take(workers: list[Worker], step: int) -> None:
        gradients = [one.gradients() for one in workers]
        if step < warmup_steps:
            gradients = [mean(gradients)] * len(workers)
        for one, own in zip(workers, gradients, strict=True):
            one.descend(own, step)
        if step >= warmup_steps and (step - warmup_steps) % period == 0:
            average(workers)

    return _curve(take)
