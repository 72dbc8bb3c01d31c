"""What the pages take for granted: the script around their blocks, small enough for a test."""

import logging
import os
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import offbeat
from offbeat.transport.connect import open_communicator

MODULES = {
    **{"torch": torch, "dist": dist, "nn": nn, "np": np, "offbeat": offbeat},
    **{"os": os, "signal": signal, "logging": logging},
}
IMPORTS = {
    **MODULES,
    "DataLoader": DataLoader,
    "DistributedDataParallel": DistributedDataParallel,
}

Space = dict[str, Any]


def _labels(space: Space) -> torch.Tensor:
    return torch.arange(64) % 4


def _dataset(space: Space) -> TensorDataset:
    labels = _labels(space)
    return TensorDataset(nn.functional.one_hot(labels, 4) + 0.1 * torch.randn(64, 4), labels)


def _sampler(space: Space) -> offbeat.data.SelDPSampler:
    return offbeat.data.SelDPSampler(get(space, "dataset"))


def _loader(space: Space) -> DataLoader[Any]:
    return DataLoader(get(space, "dataset"), batch_size=8, sampler=get(space, "sampler"))


def _optimizer(space: Space) -> torch.optim.Optimizer:
    return torch.optim.SGD(get(space, "model").parameters(), lr=0.1)


def _scheduler(space: Space) -> Any:
    return torch.optim.lr_scheduler.StepLR(get(space, "optimizer"), 10)


def _evaluate(space: Space) -> Callable[[nn.Module], float]:
    inputs, labels = get(space, "dataset").tensors
    return lambda model: float((model(inputs).argmax(1) == labels).float().mean())


def _communicator(space: Space) -> Any:
    return open_communicator(None, 60.0, what="a page")


def _held_out(space: Space) -> TensorDataset:
    return TensorDataset(torch.arange(10.0), torch.arange(10.0) + 0.05)


def _train(steps: int) -> Callable[[], None]:
    """A training that losses and newcomers do not end."""

    def train() -> None:
        own: Space = {}
        model, optimizer = get(own, "model"), get(own, "optimizer")
        inputs, labels = get(own, "dataset").tensors
        with offbeat.attach(model, optimizer, min_workers=2) as sync:
            for _ in range(sync.step, steps):
                nn.functional.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
                optimizer.zero_grad()

    return train


SUPPLIES: dict[str, Callable[[Space], Any]] = {
    "model": lambda space: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)),
    "optimizer": _optimizer,
    "loss_fn": lambda space: nn.CrossEntropyLoss(),
    "labels": _labels,
    "sources": lambda space: ["a", "b", "c", "d"] * 16,
    "dataset": _dataset,
    "validation": _dataset,
    "sampler": _sampler,
    "loader": _loader,
    "scheduler": _scheduler,
    "evaluate": _evaluate,
    "strategy": lambda space: offbeat.LocalSGD(period=2),
    "communicator": _communicator,
    "held_out": _held_out,
    "device": lambda space: torch.device("cpu"),
    "train": lambda space: _train(130),  # 6.5 virtual seconds, in the end
    "worker": lambda space: _train(5),
}


def get(space: Space, name: str) -> Any:
    """The page's own thing of that name, or one made for it."""
    if name not in space:
        space[name] = SUPPLIES[name](space)
    return space[name]
