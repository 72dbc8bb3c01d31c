"""Accelerate: its prepared model is inside DDP, and its prepared optimizer inside a wrapper."""

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from frameworks.real import MAX_NORM, SAMPLES, STEPS, Samples, ddp, run, same, state
from loops import attach
from problems import make_batch, make_model, train_step

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    accelerate = pytest.importorskip("accelerate")
pytestmark = pytest.mark.filterwarnings("default")


def bare(rank: int, text: str) -> Any:
    model = make_model(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sync = attach(model, optimizer, text)
    for step in range(STEPS):
        train_step(model, optimizer, make_batch(rank, step))
    before = state(model)
    sync.finish()
    return before, sync.stats.payload_bytes


def prepared(rank: int, text: str, clip: bool = False) -> Any:
    accelerator = accelerate.Accelerator(cpu=True)
    model = make_model(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(Samples("batches"), batch_size=SAMPLES)
    wrapped, stepping, loader = accelerator.prepare(model, optimizer, loader)
    assert type(wrapped).__name__ == "DistributedDataParallel"
    sync = attach(wrapped, stepping, text)
    for x, y in loader:
        with accelerator.accumulate(wrapped):
            accelerator.backward(F.mse_loss(wrapped(x), y))
            if clip:
                accelerator.clip_grad_norm_(wrapped.parameters(), MAX_NORM)
            stepping.step()
            stepping.zero_grad()
    before = state(model)
    sync.finish()
    assert sync.step == STEPS
    return before, sync.stats.payload_bytes


def everything(rank: int, size: int) -> Any:
    plain = ddp(rank), ddp(rank, max_norm=MAX_NORM)
    ways = [prepared(rank, "local:period=1"), prepared(rank, "bsp")]
    pairs = [(bare(rank, text), prepared(rank, text)) for text in ("local:period=4", "bsp")]
    return plain, ways, pairs, prepared(rank, "bsp", clip=True)


def test_prepared_loops_train_as_bare_ones() -> None:
    """LocalSGD(1) and BSP equal DDP, the mean is clipped, and all bytes are counted."""
    for plain, ways, pairs, clipped in run(everything):
        for model, _ in ways:
            same(model, plain[0], 1e-12)
        same(clipped[0], plain[1], 1e-12)
        for (model, sent), (wrapped, wrapped_sent) in pairs:
            same(model, wrapped)
            assert sent == wrapped_sent
