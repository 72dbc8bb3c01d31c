"""Opacus' private optimizer and PEFT's adapters, over two processes."""

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import offbeat
from frameworks.real import STEPS, run, same, state
from loops import attach, error_of
from problems import make_batch, make_model, train_step

pytestmark = pytest.mark.filterwarnings("default")


def private(rank: int, size: int) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import opacus

        model = make_model(rank, torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        x, y = make_batch(rank, 0, 32, torch.float32)
        loader = DataLoader(TensorDataset(x, y), batch_size=8)
        engine = opacus.PrivacyEngine()
        settings = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "poisson_sampling": False}
        wrapped, stepping, loader = engine.make_private(
            module=model, optimizer=optimizer, data_loader=loader, **settings
        )
        sync = attach(wrapped, stepping, "local:period=2")
        for a, b in loader:
            stepping.zero_grad()
            F.mse_loss(wrapped(a), b).backward()
            stepping.step()
        steps, syncs = sync.step, sync.stats.syncs
        sync.finish()
        inside = offbeat.BSP()
        together = make_model(rank, torch.float32)
        wrapped, stepping, _ = opacus.PrivacyEngine().make_private(
            module=opacus.distributed.DifferentiallyPrivateDistributedDataParallel(together),
            optimizer=torch.optim.SGD(together.parameters(), lr=0.05),
            data_loader=DataLoader(TensorDataset(x, y), batch_size=8),
            **settings,
        )
        error = error_of(lambda: attach(wrapped, stepping, inside))
    return state(model), steps, syncs, error


def test_private_steps_are_synchronized() -> None:
    """Each worker clips and adds noise by itself. An optimizer that also reduces is refused."""
    pytest.importorskip("opacus")
    results = run(private)
    for model, steps, syncs, error in results:
        assert (steps, syncs) == (4, 2)
        same(model, results[0][0])
        assert "DistributedDPOptimizer communicates in its step" in error[1]


def adapters(rank: int, size: int) -> Any:
    import peft

    sent = []
    for adapted in (True, False):
        model: Any = nn.Sequential(nn.Linear(4, 200), nn.Linear(200, 1)).double()
        if adapted:
            model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["0", "1"]))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)  # holds all of them
        sync = attach(model, optimizer, "local:period=1")
        before = sync.stats.payload_bytes
        for step in range(STEPS):
            train_step(model, optimizer, make_batch(rank, step))
        trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
        sent.append(((sync.stats.payload_bytes - before) / STEPS, trainable))
        sync.finish()
    return sent, state(model)


def test_only_adapters_are_sent() -> None:
    """The bytes of a step are proportional to the trainable parameters."""
    pytest.importorskip("peft")
    for sent, _ in run(adapters):
        (few, trainable), (all_of_it, whole) = sent
        rest = few - 8 * trainable  # the numbers of a round
        assert abs((all_of_it - 8 * whole) - rest) < 1
        assert trainable < whole
