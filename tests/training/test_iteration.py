"""One iteration is one step of every optimizer, regardless of what precedes it."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import offbeat
from loops import attach, close
from offbeat.strategies.base import Strategy
from problems import assign, flat, make_batch
from worlds import run


def gan(seed: int) -> nn.ModuleDict:
    torch.manual_seed(seed)
    return nn.ModuleDict({"g": nn.Linear(4, 3).double(), "d": nn.Linear(3, 1).double()})


def gan_loss(model: nn.Module, which: str, batch: tuple[Tensor, Tensor]) -> Tensor:
    fake = model["g"](batch[0]).tanh()
    if which == "d":
        return F.mse_loss(model["d"](fake.detach()), batch[1])
    return model["d"](fake).square().mean()


def gan_optimizers(model: nn.Module) -> dict[str, Optimizer]:
    return {
        "g": torch.optim.SGD(model["g"].parameters(), lr=0.05, momentum=0.9),
        "d": torch.optim.AdamW(model["d"].parameters(), lr=0.01),
    }


def train_gan(rank: int, size: int, strategy: Strategy, order: str) -> Any:
    model = gan(seed=rank)
    optimizers = gan_optimizers(model)
    sync = attach(model, [optimizers["g"], optimizers["d"]], strategy)
    trace, counts = [], []
    for step in range(7):
        for which in order:
            model.zero_grad()
            gan_loss(model, which, make_batch(rank, 10 * step + (which == "d"))).backward()
            nn.utils.clip_grad_norm_(model[which].parameters(), 0.1)
            optimizers[which].step()
            counts.append(sync.step)
        trace.append(flat(model))
    sync.finish()
    return trace, counts, sync.stats, flat(model)


@pytest.mark.parametrize("strategy", [offbeat.BSP(), offbeat.LocalSGD(period=3)], ids=str)
@pytest.mark.parametrize("order", ["dg", "gd"])
def test_optimizers_that_step_in_turn_are_one_iteration(strategy: Strategy, order: str) -> None:
    """Pitfall 5: GAN order. Each part is averaged equally often, at the end of the iteration."""
    models = [gan(seed=0) for _ in range(3)]
    optimizers = [gan_optimizers(model) for model in models]
    expected = []
    for step in range(7):
        for which in order:
            for rank, model in enumerate(models):
                model.zero_grad()
                batch = make_batch(rank, 10 * step + (which == "d"))
                gan_loss(model, which, batch).backward()
            if isinstance(strategy, offbeat.BSP):
                for same in zip(*(m[which].parameters() for m in models), strict=True):
                    mean = sum(p.grad for p in same) / 3
                    for p in same:
                        p.grad = mean.clone()
            for model, each in zip(models, optimizers, strict=True):
                nn.utils.clip_grad_norm_(model[which].parameters(), 0.1)
                each[which].step()
        if not isinstance(strategy, offbeat.BSP) and step % 3 == 2:
            mean = sum(flat(m) for m in models) / 3
            for m in models:
                assign(m, mean.clone())
        expected.append([flat(m) for m in models])
    end = sum(expected[-1]) / 3
    for rank, (trace, counts, stats, final) in enumerate(
        run(train_gan, strategy, order, workers=3)
    ):
        for got, want in zip(trace, expected, strict=True):
            close(got, want[rank])
        close(final, end)
        assert counts == [step + half for step in range(7) for half in (0, 1)]
        assert stats.steps == 7
        assert stats.syncs == (7 if isinstance(strategy, offbeat.BSP) else 2)
