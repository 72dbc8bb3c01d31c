"""What the training loop does to gradients after backward, where they are averaged."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loops import attach, close, error_of, sgd, start
from problems import (
    OPTIMIZERS,
    bsp_reference,
    flat,
    gradients,
    loss_of,
    make_batch,
    make_model,
)
from worlds import run

MAX_NORM = 0.3  # every gradient of these problems is longer
STEPS = 6


def by_sync(model: nn.Module, sync: Any) -> None:
    sync.clip_grad_norm_(MAX_NORM)


def by_torch(model: nn.Module, sync: Any) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)


WAYS = [by_sync, by_torch]


def trained(rank: int, size: int, clip: Callable[..., None], scaled: bool) -> Any:
    model = make_model(rank)
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4) if scaled else None
    sync = attach(model, optimizer, "bsp", scaler=scaler)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, make_batch(rank, step))
        if scaler is None:
            loss.backward()
            clip(model, sync)
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            clip(model, sync)
            scaler.step(optimizer)
            scaler.update()
    sync.finish()
    return flat(model)


@pytest.mark.parametrize("clip", WAYS)
@pytest.mark.parametrize("scaled", [False, True])
def test_the_mean_is_clipped(clip: Callable[..., None], scaled: bool) -> None:
    """As under DDP, which averages before the clip."""
    expected = bsp_reference(2, "momentum", STEPS, MAX_NORM)[-1]
    for model in run(trained, clip, scaled, workers=2):
        close(model, expected)


def replaced(rank: int, size: int, clips: bool) -> Tensor:
    """Replace the gradients after backward, as optimizers for differential privacy do."""
    model = make_model(rank)
    optimizer = sgd(model)
    with attach(model, optimizer, "bsp") as sync:
        loss_of(model, make_batch(rank, 0)).backward()
        for p, gradient in zip(
            model.parameters(), gradients(model, make_batch(rank, 0)), strict=True
        ):
            p.grad = 2 * gradient
        if clips:
            sync.clip_grad_norm_(MAX_NORM)
        optimizer.step()
    return flat(model)


@pytest.mark.parametrize("clips", [False, True])
def test_gradients_that_the_loop_sets_are_averaged_before_the_clip_or_step(clips: bool) -> None:
    def double(model: nn.Module) -> None:
        for p in model.parameters():
            p.grad *= 2  # type: ignore[operator]
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)

    (expected,) = bsp_reference(2, "sgd", 1, change=double)
    for result in run(replaced, clips, workers=2):
        close(result, expected)


def accumulating(rank: int, size: int, text: str) -> Any:
    """Take steps with one and with two backward passes. Returns errors, and SelSync's norms."""
    model, optimizer, sync = start(rank, text)
    errors = []
    for sizes in ((1,), (2,), (1, 1)):
        optimizer.zero_grad()
        for i in range(len(sizes)):
            loss = sizes[i] * loss_of(model, make_batch(rank, 0))
            errors.append(error_of(loss.backward))
        optimizer.step()
    errors = errors[-1:]
    with sync.no_sync(), sync.no_sync() if rank else nullcontext():
        loss_of(model, make_batch(rank, 0)).backward()
        errors.append(error_of(optimizer.step))
    loss = loss_of(model, make_batch(rank, 0)) * (float("nan") if rank else 1)
    optimizer.zero_grad()
    errors.append(error_of(loss.backward))
    sync.detach()
    return errors


@pytest.mark.parametrize("text", ["bsp", "selsync:delta=0"])
def test_errors_of_backward_and_no_sync(text: str) -> None:
    """Errors at the end of backward reach its caller with their type."""
    for second, inside, last in run(accumulating, text, workers=2):
        assert second[0] == []
        assert inside[0][0] == "AttachError"
        assert "optimizer.step() inside no_sync()" in inside[1]
        assert ("OffbeatError" in last[0]) == (text != "selsync:delta=0")
