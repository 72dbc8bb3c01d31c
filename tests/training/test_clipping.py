"""Gradients are clipped after the strategy has received them, by any function."""

import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import offbeat
from cells import some
from loops import attach, close, sgd
from offbeat.training import clipping
from problems import (
    OPTIMIZERS,
    Simulated,
    bsp_reference,
    flat,
    gradients,
    loss_of,
    make_batch,
    make_model,
)
from worlds import run, simulated

MAX_NORM = 0.3  # every gradient of these problems is longer
STEPS = 6
clip_by_torch = nn.utils.clip_grad_norm_


def by_sync(model: nn.Module, sync: Any) -> None:
    sync.clip_grad_norm_(MAX_NORM)


def by_torch(model: nn.Module, sync: Any) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM, norm_type=2.0)


def by_a_name(model: nn.Module, sync: Any) -> None:
    """Clip with a function that a script has imported before anything was attached."""
    clip_grad_norm_(list(model.parameters()), max_norm=MAX_NORM)


def twice(model: nn.Module, sync: Any) -> None:
    by_torch(model, sync)
    by_sync(model, sync)


WAYS = [by_sync, by_torch, by_a_name, twice]


@pytest.fixture(scope="module", autouse=True)
def _no_dropped_models() -> None:
    """Free models that other tests have dropped without detaching them."""
    gc.collect()


def torchs_functions() -> Any:
    return nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_


def trained(rank: int, size: int, clip: Callable[..., None], text: str, scaled: bool) -> Any:
    model = make_model(rank)
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4) if scaled else None
    sync = attach(model, optimizer, text, scaler=scaler)
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


@pytest.mark.parametrize("clip", some(WAYS, 0, 1))
@pytest.mark.parametrize("scaled", [False, True])
def test_under_bsp_the_mean_is_clipped(clip: Callable[..., None], scaled: bool) -> None:
    """As under DDP, which averages before the clip."""
    expected = bsp_reference(2, "momentum", STEPS, MAX_NORM)[-1]
    originals = torchs_functions()
    for model in run(trained, clip, "bsp", scaled, workers=2):
        close(model, expected, 1e-6 if clip is twice else 1e-12)  # torch adds 1e-6 to the norm
    assert torchs_functions() == originals


@pytest.mark.parametrize("clip", WAYS)
def test_without_a_mean_of_gradients_each_worker_clips_local_gradients(
    clip: Callable[..., None],
) -> None:
    reference = Simulated.start(2, "momentum")
    for step in range(STEPS):
        for rank, (model, optimizer) in enumerate(
            zip(reference.models, reference.optimizers, strict=True)
        ):
            optimizer.zero_grad()
            loss_of(model, make_batch(rank, step)).backward()
            clip_by_torch(model.parameters(), MAX_NORM)
            optimizer.step()
        if step % 2:
            reference.average()
    for model in run(trained, clip, "local:period=2", False, workers=2):
        close(model, reference.flat()[0], 1e-6 if clip is twice else 1e-12)


def skipping(rank: int, size: int, clip: Callable[..., None]) -> Any:
    model = make_model(rank)
    optimizer = sgd(model)
    sync = attach(model, optimizer, "bsp")
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, make_batch(rank, step)).backward()
        clip(model, sync)
        if step % 3 != 1:
            optimizer.step()
    counted = sync.step
    sync.finish()
    return flat(model), counted


@pytest.mark.parametrize("clip", [by_sync, by_torch])
def test_a_loop_may_skip_the_step_after_a_clip(clip: Callable[..., None]) -> None:
    """It counts like a step that a scaler has skipped, and the next gradients are averaged, too."""
    model = make_model(0)
    optimizer = sgd(model)
    for step in range(STEPS):
        each = [gradients(model, make_batch(rank, step)) for rank in range(2)]
        for p, *parts in zip(model.parameters(), *each, strict=True):
            p.grad = sum(parts) / 2  # type: ignore[assignment]
        clip_by_torch(model.parameters(), MAX_NORM)
        if step % 3 != 1:
            optimizer.step()
    for result, counted in run(skipping, clip, workers=2):
        close(result, flat(model))
        assert counted == STEPS


def by_value(rank: int, size: int) -> Tensor:
    model = make_model(rank)
    optimizer = sgd(model)
    with attach(model, optimizer, "bsp"):
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, make_batch(rank, step)).backward()
            nn.utils.clip_grad_value_(model.parameters(), 0.05)
            optimizer.step()
    return flat(model)


def test_clipping_by_value_clips_the_mean() -> None:
    model = make_model(0)
    optimizer = sgd(model)
    for step in range(STEPS):
        each = [gradients(model, make_batch(rank, step)) for rank in range(2)]
        for p, *parts in zip(model.parameters(), *each, strict=True):
            p.grad = (sum(parts) / 2).clamp(-0.05, 0.05)  # type: ignore[union-attr]
        optimizer.step()
    for result in run(by_value, workers=2):
        close(result, flat(model))


def warned(rank: int, size: int) -> None:
    """Clip two optimizers together, and clip in the middle of accumulation."""
    for several in (True, False):
        model = make_model(rank)
        optimizers = [sgd(model[0]), sgd(model[2:])] if several else [sgd(model)]
        sync = attach(model, optimizers, "bsp")
        for step in range(4):
            model.zero_grad()
            for micro in range(1 if several else 2):
                loss_of(model, make_batch(rank, 2 * step + micro)).backward()
                nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            for optimizer in optimizers:
                optimizer.step()
        sync.finish()


def test_unsupported_clips_are_warned_about_once() -> None:
    """Each worker warns once."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        simulated(warned, workers=2)
    messages = sorted(str(one.message) for one in caught)
    assert len(messages) == 4
    assert all("changed between a clip and optimizer.step()" in one for one in messages[:2])
    assert all("clips the gradients of several optimizers" in one for one in messages[2:])


def is_replaced() -> bool:
    return nn.utils.clip_grad_norm_.__code__.co_filename == clipping.__file__


def alone(rank: int, size: int) -> Any:
    model, other = make_model(rank), make_model(5)
    sync = attach(model, sgd(model), "local:period=2")
    replaced = [is_replaced()]
    sync.detach()
    sync = attach(model, sgd(model), "bsp")
    replaced.append(is_replaced())
    loss_of(other, make_batch(rank, 0)).backward()
    expected = nn.utils.get_total_norm([p.grad for p in other.parameters() if p.grad is not None])
    close(nn.utils.clip_grad_norm_(other.parameters(), MAX_NORM), expected)
    steps = sync.step
    sync.detach()
    return replaced, steps


def test_torchs_functions_are_replaced_only_if_needed() -> None:
    """Other models are clipped as always."""
    originals = torchs_functions()
    for replaced, steps in run(alone, workers=2):
        assert (replaced, steps) == ([False, True], 0)
    assert torchs_functions() == originals


def test_a_dropped_model_is_freed() -> None:
    """Without ``detach``: torch's functions are restored, and the model is freed."""

    def train() -> Any:
        model = make_model()
        offbeat.attach(model, sgd(model), offbeat.BSP())
        assert torchs_functions() != before
        return weakref.ref(model)

    before = torchs_functions()
    dropped = simulated(lambda rank, size: train(), workers=1)[0]
    gc.collect()
    assert torchs_functions() == before
    assert dropped() is None
