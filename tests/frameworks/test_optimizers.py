"""Optimizers of other packages: schedule-free, sharpness-aware, and with 8-bit state."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import offbeat
from frameworks.real import STEPS, need, run, same, state
from loops import attach, error_of
from problems import loss_of, make_batch, make_model, make_wide, wide_loss

pytestmark = pytest.mark.filterwarnings("default")
Make = Callable[[nn.Module], Any]


def train(rank: int, make: Make, text: str | None, *, looks: bool = False) -> Any:
    """Train a schedule-free loop. With ``looks`` it evaluates the consensus after each step."""
    model = make_model(rank)
    called: nn.Module = DistributedDataParallel(model) if text is None else model
    optimizer = make(model)
    sync = None if text is None else attach(model, optimizer, text)
    for step in range(STEPS):
        optimizer.train()
        optimizer.zero_grad()
        loss_of(called, make_batch(rank, step)).backward()
        optimizer.step()
        optimizer.eval()
        if looks and sync is not None:
            with sync.consensus():
                seen = state(model)
    if sync is not None:
        assert sync.step == STEPS
        sync.finish()
    if looks:
        same(seen, state(model))
    return state(model)


def sgd_free(model: nn.Module) -> Any:
    import schedulefree

    return schedulefree.SGDScheduleFree(model.parameters(), lr=0.05)


def adamw_free(model: nn.Module) -> Any:
    import schedulefree

    return schedulefree.AdamWScheduleFree(model.parameters(), lr=0.01)


def schedule_free(rank: int, size: int) -> Any:
    linear = [train(rank, sgd_free, text) for text in (None, "bsp", "local:period=1")]
    looking = train(rank, sgd_free, "local:period=4", looks=True)
    plain = train(rank, sgd_free, "local:period=4")
    adaptive = [train(rank, adamw_free, text) for text in (None, "bsp")]
    return linear, adaptive, (looking, plain), train(rank, adamw_free, "streaming")


def test_schedule_free_trains_as_under_ddp() -> None:
    """The mean is taken in ``eval()``, over the models that the workers would evaluate."""
    need("schedulefree")
    results = run(schedule_free)
    for linear, adaptive, (looking, plain), streaming in results:
        for one in linear[1:]:
            same(one, linear[0], 1e-12)
        same(adaptive[1], adaptive[0], 1e-12)
        same(looking, plain, 1e-12)
        same(streaming, results[0][3])


# -- state of 8 bits -----------------------------------------------------------------------------


def adam_bnb(model: nn.Module) -> Any:
    import bitsandbytes

    return bitsandbytes.optim.Adam8bit(model.parameters(), lr=0.01, min_8bit_size=1024)


def adam_torchao(model: nn.Module) -> Any:
    from torchao.optim import AdamW8bit

    return AdamW8bit(model.parameters(), lr=0.01)


def few_bits(rank: int, make: Make, text: str | None, **options: Any) -> Any:
    model = make_wide(rank)
    called: nn.Module = DistributedDataParallel(model) if text is None else model
    optimizer = make(model)
    sync = None if text is None else attach(model, optimizer, text, **options)
    for step in range(STEPS):
        optimizer.zero_grad()
        wide_loss(called, rank, step).backward()
        optimizer.step()
    if sync is not None:
        assert sync.step == STEPS
        sync.finish()
    coded = [
        value
        for values in optimizer.state.values()
        for value in values.values()
        if isinstance(value, torch.Tensor)
        and (type(value) is not torch.Tensor or value.dtype == torch.uint8)
    ]
    assert coded, "nothing was quantised"
    return state(model)


def eight_bits(rank: int, size: int, make: Make) -> Any:
    return [few_bits(rank, make, text) for text in (None, "bsp", "local:period=2", "streaming")]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("package", "make"), [("bitsandbytes", adam_bnb), ("torchao", adam_torchao)]
)
def test_state_of_eight_bits_stays_each_workers_own(package: str, make: Make) -> None:
    need(package)
    results = run(eight_bits, make)
    for ddp, bsp, local, streaming in results:
        same(bsp, ddp, 1e-7)
        same(local, results[0][2])
        same(streaming, results[0][3])


# -- two gradients a step ------------------------------------------------------------------------


def sam(model: nn.Module) -> Any:
    import pytorch_optimizer

    return pytorch_optimizer.SAM(
        model.parameters(), base_optimizer=torch.optim.SGD, rho=0.1, lr=0.05
    )


def sharp(rank: int, size: int) -> Any:
    found = []
    for text, halves in (
        ("bsp", False),
        ("bsp", True),
        ("local:period=1", False),
        ("local:period=1", True),
    ):
        model = make_model(rank)
        optimizer = sam(model)
        sync = attach(model, optimizer.base_optimizer if halves else optimizer, text)
        for step in range(STEPS):
            batch = make_batch(rank, step)

            def closure(batch: Any = batch, model: Any = model) -> Any:
                loss = loss_of(model, batch)
                loss.backward()
                return loss

            with sync.no_sync():  # each worker searches the worst point alone
                closure()
            if halves:
                optimizer.first_step(zero_grad=True)
                closure()
                optimizer.second_step(zero_grad=True)
            else:
                optimizer.step(closure)
                optimizer.zero_grad()
        assert sync.step == sync.stats.syncs == STEPS
        found.append(state(model))
        sync.finish()
    model = make_model(rank)
    optimizer = sam(model)
    sync = attach(model, optimizer, offbeat.BSP())
    loss_of(model, batch).backward()
    optimizer.first_step(zero_grad=True)
    loss_of(model, batch).backward()
    error = error_of(lambda: optimizer.second_step(zero_grad=True))
    sync.detach()
    return found, error


def test_sharpness_aware_steps_are_synchronized_once() -> None:
    """As a whole, or by halves with the inner optimizer attached. With SGD both means are equal."""
    need("pytorch_optimizer")
    results = run(sharp)
    for found, (kinds, message) in results:
        for one in found[1:]:
            same(one, found[0], 1e-12)
        assert "AttachError" in kinds
        assert "took a step outside of SAM.step()" in message
        same(found[0], results[0][0][0])
