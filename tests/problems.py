"""Small training problems and slow references for the tests, written without Offbeat.

Every worker builds its model from its own seed and reads its own data, so that averaging changes
something. References start where ``attach`` starts everyone: at the model of rank 0.
"""

import copy
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

Batch = tuple[Tensor, Tensor]

OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, fused=True),
}


def make_model(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """A network of 40 parameters."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2), nn.Linear(2, 1)).to(dtype)


PARAMETERS = sum(p.numel() for p in make_model().parameters())


def make_batch(rank: int, step: int, samples: int = 4, dtype: torch.dtype = torch.float64) -> Batch:
    """The batch of ``rank`` at ``step``: another distribution on each rank."""
    generator = torch.Generator().manual_seed(7919 * rank + step)
    x = torch.randn(samples, 4, generator=generator, dtype=torch.float64)
    y = x.sin().sum(1, keepdim=True) + 0.5 * rank
    return x.to(dtype), y.to(dtype)


def make_wide(seed: int, *, norm: bool = False) -> nn.Sequential:
    """8,705 parameters, enough for quantising to pay with 3 workers, in small buckets too."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers: list[nn.Module] = [nn.Linear(4, 64), nn.Tanh()]
        layers += [nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()]
        if norm:
            layers.append(nn.BatchNorm1d(64))
        return nn.Sequential(*layers, nn.Linear(64, 1))


def wide_loss(model: nn.Module, rank: int, step: int, samples: int = 8) -> Tensor:
    """Of a model of ``make_wide`` on a batch of ``rank``."""
    return loss_of(model, make_batch(rank, step, samples, torch.float32))


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def train_step(model: nn.Module, optimizer: Optimizer, batch: Batch) -> None:
    optimizer.zero_grad()
    loss_of(model, batch).backward()
    optimizer.step()


def wide_step(model: nn.Module, optimizer: Optimizer, rank: int, step: int) -> None:
    optimizer.zero_grad()
    wide_loss(model, rank, step).backward()
    optimizer.step()


def flat(model: nn.Module) -> Tensor:
    """A copy of all parameters as one vector."""
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).clone()


def assign(model: nn.Module, values: Tensor) -> None:
    with torch.no_grad():
        nn.utils.vector_to_parameters(values, model.parameters())


def gradients(model: nn.Module, batch: Batch) -> list[Tensor]:
    return [g.detach() for g in torch.autograd.grad(loss_of(model, batch), model.parameters())]


@dataclass
class Simulated:
    """N workers in one process: the models and optimizers a reference works on."""

    models: list[nn.Module]
    optimizers: list[Optimizer]

    @classmethod
    def start(cls, workers: int, kind: str, model: nn.Module | None = None) -> "Simulated":
        first = make_model(0) if model is None else model
        models: list[nn.Module] = [copy.deepcopy(first) for _ in range(workers)]
        return cls(models, [OPTIMIZERS[kind](m.parameters()) for m in models])

    def step(self, step: int) -> None:
        """One local step of every worker."""
        for rank, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            train_step(model, optimizer, make_batch(rank, step))

    def average(self, weights: Sequence[float] | None = None) -> None:
        """Every model becomes the (weighted) mean of all."""
        weights = weights or [1.0] * len(self.models)
        total = sum(w * flat(m) for w, m in zip(weights, self.models, strict=True))
        for model in self.models:
            assign(model, total / sum(weights))

    def flat(self) -> list[Tensor]:
        return [flat(model) for model in self.models]


def bsp_reference(
    workers: int,
    kind: str,
    steps: int,
    max_norm: float | None = None,
    change: Callable[[nn.Module], object] = lambda model: None,
) -> list[Tensor]:
    """The model after each step of one worker that uses the mean of all gradients.

    It may clip the mean, or ``change`` it in another way.
    """
    model = make_model(0)
    optimizer = OPTIMIZERS[kind](model.parameters())
    trace = []
    for step in range(steps):
        each = [gradients(model, make_batch(rank, step)) for rank in range(workers)]
        for p, *parts in zip(model.parameters(), *each, strict=True):
            p.grad = sum(parts) / workers  # type: ignore[assignment]
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        change(model)
        optimizer.step()
        trace.append(flat(model))
    return trace


def gradient_at(x: Tensor, rank: int, step: int) -> Tensor:
    """The gradient of a batch of ``rank`` at the parameters ``x``, as one vector."""
    model = make_model(seed=0)
    assign(model, x.clone())
    return torch.cat([g.reshape(-1) for g in gradients(model, make_batch(rank, step))])


def squared(parts: Sequence[Tensor]) -> float:
    """‖g‖², the slow way."""
    return sum(float(value) ** 2 for part in parts for value in part.reshape(-1))


def changes(norms: Sequence[float], smoothing: float, window: int | None = None) -> list[float]:
    """Δ of every step, from the definition, looking back over all norms each time."""
    means = []
    for i in range(len(norms)):
        if window is None:
            # m_i = Σ_k a(1−a)^k s_{i−k} + (1−a)^i s_0
            mean = (1 - smoothing) ** i * norms[0]
            mean += sum(smoothing * (1 - smoothing) ** k * norms[i - k] for k in range(i))
        else:
            kept = norms[max(0, i - window + 1) : i + 1][::-1]
            weights = [(1 - smoothing) ** k for k in range(len(kept))]
            mean = sum(w * s for w, s in zip(weights, kept, strict=True)) / sum(weights)
        means.append(mean)
    result = [float("inf")]
    for before, after in itertools.pairwise(means):
        result.append(abs(after - before) / before)
    return result
