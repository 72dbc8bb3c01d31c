"""Idioms of public training scripts (nanoGPT, minGPT-ddp, imagenet, …), moved to Offbeat."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offbeat
from loops import Quick, attach, error_of, sgd
from problems import flat, loss_of, make_batch, make_model, train_step
from workers import run

STRATEGIES = ["bsp", "local:period=4", "diloco:period=5", "streaming:staleness=6"]


def batch_of(rank: int, step: int) -> Any:
    return make_batch(rank, step, dtype=torch.float32)


def interrupt(rank: int) -> tuple[str, list[str], torch.Tensor]:
    """Press Ctrl-C on rank 0 in its first synchronization, and follow the advice."""
    model = make_model(seed=rank, dtype=torch.float32)
    optimizer = sgd(model)
    sync = attach(model, optimizer, "diloco:period=2")
    kinds = []
    if rank == 0:

        def press(*args: Any, **kwargs: Any) -> None:
            raise KeyboardInterrupt

        sync._iteration.flow.land = press
    with contextlib.suppress(KeyboardInterrupt):
        for step in range(6):
            kinds += error_of(lambda s=step: train_step(model, optimizer, batch_of(rank, s)))[0]
    advice = error_of(lambda: train_step(model, optimizer, batch_of(rank, 9)))[1]
    sync.detach()
    with attach(model, optimizer, "diloco:period=2"):
        for step in range(4):
            train_step(model, optimizer, batch_of(rank, step))
    return advice, kinds, flat(model)


def cross(rank: int) -> tuple[list[str], str]:
    """Finish two synchronizers in another order on each rank."""
    models = [make_model(seed=rank) for _ in range(2)]
    syncs = [attach(m, sgd(m), "bsp", group=Quick(), timeout_seconds=1) for m in models]
    result = error_of(syncs[rank].finish)
    for sync in syncs:
        sync.detach()
    return result


def script(rank: int, size: int) -> Any:
    return interrupt(rank), cross(rank)


def test_scripts_of_two_processes() -> None:
    """The advice of the error after Ctrl-C works. Crossed calls of finish() end in an error."""
    ((advice, _, model), first), ((_, kinds, other), second) = run(script, workers=2)
    assert "interrupted by KeyboardInterrupt" in advice
    assert "Call detach() here: the others then raise a CommunicationError" in advice
    assert "CommunicationError" in kinds
    assert torch.equal(model, other), "both have attached again"
    for kinds, error in (first, second):
        assert kinds[:1] == ["CommunicationTimeout"], error
    # The other one may have noticed before that the first one gave up.
    assert any("in finish() of another synchronizer" in error for _, error in (first, second))


# -- a single process ------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [*STRATEGIES, "selsync", "async", "fedavg:period=2"])
def test_a_script_without_a_process_group_trains_alone(text: str, tmp_path: Path) -> None:
    """Every member works, and the model is that of a plain loop."""
    model, plain = make_model(), make_model()
    ema = torch.optim.swa_utils.AveragedModel(model)
    optimizer, other = sgd(model), sgd(plain)
    sync = attach(model, optimizer, text, wire="float32")
    assert offbeat.load(tmp_path, sync) is None
    exact = text.split(":")[0] != "diloco"  # which moves elsewhere
    for step in range(6):
        optimizer.zero_grad()
        loss_of(model, make_batch(0, step)).backward()
        norm = sync.clip_grad_norm_(1.0)
        sync.record(norm=norm)
        optimizer.step()
        other.zero_grad()
        loss_of(plain, make_batch(0, step)).backward()
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        if exact:
            torch.testing.assert_close(norm, expected)
        other.step()
        if step == 3:
            offbeat.save(tmp_path, sync)
            with sync.consensus(also=[ema]):
                loss_of(model, make_batch(0, 9))
    assert (sync.rank, sync.size, sync.step, sync.stats.steps) == (0, 1, 6, 6)
    found = offbeat.load(tmp_path, sync)
    assert found is not None
    assert (found.step, sync.step) == (4, 4)
    for step in (4, 5):
        optimizer.zero_grad()
        loss_of(model, make_batch(0, step)).backward()
        sync.clip_grad_norm_(1.0)
        optimizer.step()
    sync.finish()
    if exact:
        torch.testing.assert_close(flat(model), flat(plain))


def test_a_node_of_a_single_process_is_that_process() -> None:
    model = make_model()
    with attach(model, sgd(model), "bsp", node_group="auto") as sync:
        assert sync.size == 1
