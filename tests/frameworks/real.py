"""Shared parts of the tests with real packages: environment, data, reference."""

import importlib.util
import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

import offbeat
import workers
from problems import loss_of, make_batch, make_model

STEPS = 6
SAMPLES = 4  # in a batch, as in ``make_batch``
MAX_NORM = 0.3


def environment(rank: int, size: int) -> None:
    """Set the environment as torchrun does. The process group exists already."""
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ.update({name: str(value) for name, value in ranks.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1", TORCHELASTIC_RUN_ID="a test")
    os.environ.update(ACCELERATE_USE_CPU="true", HF_HUB_OFFLINE="1")


def run(function: Any, *args: Any) -> list[Any]:
    """Run two processes in such an environment."""
    return workers.run(_in_environment, function, args, workers=2, seconds=110)


def _in_environment(rank: int, size: int, function: Any, args: tuple[Any, ...]) -> Any:
    environment(rank, size)
    return function(rank, size, *args)


def need(package: str) -> None:
    """Skip the test if a package is not installed, without importing it."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"no {package}")


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Samples in an order in which rank r receives ``make_batch(r, s)`` at step s.

    Args:
        turns: Unit that two workers take in turns: "batches" (Accelerate), "samples" (torch).
        dtype: Dtype of the samples.
    """

    def __init__(self, turns: str, dtype: torch.dtype = torch.float64) -> None:
        self._samples: list[tuple[Tensor, Tensor]] = []
        for step in range(STEPS):
            xs, ys = zip(*(make_batch(r, step, SAMPLES, dtype) for r in range(2)), strict=True)
            x, y = torch.stack(xs), torch.stack(ys)  # by worker and sample
            if turns == "samples":
                x, y = x.transpose(0, 1), y.transpose(0, 1)
            x, y = x.reshape(-1, *x.shape[2:]), y.reshape(-1, *y.shape[2:])
            self._samples += list(zip(x, y, strict=True))

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._samples[index]


def ddp(rank: int, *, lr: float = 0.05, max_norm: float | None = None) -> dict[str, Tensor]:
    """Return the model after training under torch's DDP, the reference for all tests."""
    model = make_model(0)
    wrapper = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(wrapper, make_batch(rank, step)).backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
    return state(model)


def values_under_a_trainer(rank: int, size: int, train: Any, clip: str, folder: str) -> Any:
    plain, clipped = ddp(rank), ddp(rank, max_norm=MAX_NORM)
    local = train(rank, folder, offbeat.LocalSGD(period=1))
    bsp = train(rank, folder, offbeat.BSP(), **{clip: MAX_NORM})
    selsync = train(rank, folder, offbeat.SelSync(delta=0.0), **{clip: 1e-3})
    return plain, clipped, local, bsp, selsync[3]


def check_trainer(train: Any, clip: str, folder: str) -> None:
    """Check that a trainer's callback gives the values of DDP, also with its option ``clip``.

    The mean is clipped, and the trigger sees the unclipped gradient.
    """
    for plain, clipped, local, bsp, records in run(values_under_a_trainer, train, clip, folder):
        same(local[0], plain, 1e-12)
        same(bsp[0], clipped, 1e-12)
        assert local[1].steps == bsp[1].steps == STEPS
        # Gradients that are all clipped to one norm would not change at all.
        assert all(record["change"] > 1e-3 for record in records[1:])


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor], atol: float = 0.0) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=0, atol=atol)
