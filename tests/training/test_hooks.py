"""Hooks on the user's objects: schedulers, closures and scalers. No hook remains afterwards."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import offbeat
from loops import attach, close, error_of
from problems import (
    OPTIMIZERS,
    assign,
    flat,
    gradients,
    loss_of,
    make_batch,
    make_model,
    train_step,
)
from worlds import real, run


class TwiceSGD(torch.optim.SGD):
    """Evaluates its closure twice per step, as line searches do."""

    def step(self, closure: Any = None) -> Any:
        closure()
        return super().step(closure)


class NeverSGD(torch.optim.SGD):
    """Ignores its closure."""

    def step(self, closure: Any = None) -> Any:
        return None


def closure_times(rank: int, size: int, kind: type[torch.optim.SGD]) -> tuple[list[str], str]:
    model = make_model(seed=rank)
    optimizer = kind(model.parameters(), lr=0.1)
    sync = attach(model, optimizer, offbeat.LocalSGD(period=1))
    error = error_of(lambda: optimizer.step(lambda: loss_of(model, make_batch(rank, 0)).backward()))
    sync.detach()
    return error


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (TwiceSGD, "TwiceSGD calls its closure more than once"),
        (NeverSGD, "NeverSGD took a step without calling its closure"),
    ],
)
def test_a_closure_that_is_not_called_once_is_refused(
    kind: type[torch.optim.SGD], words: str
) -> None:
    """An AttachError names the optimizer: for example line searches cannot be synchronized."""
    for kinds, text in run(closure_times, kind, workers=2):
        assert kinds[0] == "AttachError"
        assert words in text


SCALED = [
    offbeat.BSP(),
    offbeat.LocalSGD(period=2),
    offbeat.SelSync(delta=0.0),
]

OVERFLOWS = {(1, 2), (1, 3), (0, 5)}  # (rank, step); BSP skips these on all ranks


def scaled(rank: int, size: int, unscale: bool) -> Any:
    results = []
    for strategy in SCALED:
        model = make_model(seed=rank, dtype=torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        sync = attach(model, optimizer, strategy, scaler=scaler)
        trace, counts = [], []
        for step in range(8):
            optimizer.zero_grad()
            batch = make_batch(rank, step, dtype=torch.float32)
            factor = float("inf") if (rank, step) in OVERFLOWS else 1
            scaler.scale(factor * loss_of(model, batch)).backward()
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            trace.append(flat(model))
            counts.append(sync.step)
        scale = scaler.get_scale()
        sync.finish()
        results.append((trace, counts, sync.stats.syncs, scale))
    return results


@pytest.mark.parametrize("unscale", [False, True])
def test_an_overflow_on_one_rank_keeps_iterations_aligned(unscale: bool) -> None:
    """Pitfall 3: a skipped step counts as an iteration, so all ranks average the same ones."""
    results = run(scaled, unscale, workers=2)
    for index, strategy in enumerate(SCALED):
        models = [make_model(seed=0, dtype=torch.float32) for _ in range(2)]
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in models]
        by_gradient = "gradients" in str(strategy)
        for step in range(8):
            bad = [(rank, step) in OVERFLOWS for rank in range(2)]
            each = []
            for rank, model in enumerate(models):
                each.append(gradients(model, make_batch(rank, step, dtype=torch.float32)))
            good = [g for g, overflow in zip(each, bad, strict=True) if not overflow]
            for rank, model in enumerate(models):
                used = good if by_gradient else each if index == 0 else [each[rank]]
                if bad[rank] or (index == 0 and any(bad)):
                    continue
                for p, *parts in zip(model.parameters(), *used, strict=True):
                    p.grad = sum(parts) / len(parts)
                optimizers[rank].step()
            if not by_gradient and (index == 2 or (index == 1 and step % 2)):
                mean = sum(flat(m) for m in models) / 2
                for m in models:
                    assign(m, mean.clone())
            for rank, model in enumerate(models):
                close(results[rank][index][0][step], flat(model), atol=2e-6)
        for rank in range(2):
            _, counts, syncs, scale = results[rank][index]
            assert counts == list(range(1, 9))
            assert syncs == (4 if index == 1 else 8)
            skipped = 3 if index == 0 else sum(r == rank for r, _ in OVERFLOWS)
            assert scale == 256.0 / 2**skipped


DETACHED = [
    offbeat.BSP(),
    offbeat.LocalSGD(period=2),
    offbeat.SelSync(delta=0.05),
    offbeat.AsyncAveraging(staleness=4, schedule="eager"),
]


def skipped_last(rank: int, size: int, text: str, fused: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Average after the second step; rank 1 overflows in the third.

    Returns models before and at the end.
    """
    model = make_model(seed=rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    trace = []
    with attach(model, optimizer, text, scaler=scaler) as sync:
        for step in range(3):
            optimizer.zero_grad()
            loss = loss_of(model, make_batch(rank, step))
            scaler.scale(loss * (float("inf") if (rank, step) == (1, 2) else 1)).backward()
            scaler.step(optimizer)
            scaler.update()
            trace.append(flat(model))
        assert sync.step == 3
    return trace[1], trace[2], flat(model)


@pytest.mark.parametrize(
    ("text", "fused"),
    [
        ("local:period=2", False),
        ("diloco:period=2,outer_momentum=0,outer_lr=1", False),
        ("local:period=2", True),
    ],
)
def test_a_skipped_step_adds_no_weight_to_the_final_mean(text: str, fused: bool) -> None:
    """The final mean is over the workers with unsynchronized steps: rank 0 alone.

    If the optimizer is fused, the scaler lets it step, and the optimizer skips the step itself.
    """
    (shared, first, end), (same, second, other) = run(skipped_last, text, fused, workers=2)
    assert torch.equal(shared, same)
    assert torch.equal(second, shared), "the step was skipped"
    assert not torch.equal(first, shared)
    assert torch.equal(end, first)
    assert torch.equal(other, first)


class ShardedSGD(torch.optim.SGD):
    """Gathers its updates in ``step``, as an optimizer that divides its work among workers."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            dist.broadcast(parameter.data, 0)


def sharded_optimizer(rank: int, size: int, text: str) -> tuple[list[str], str]:
    model = make_model(seed=rank)
    optimizer = ShardedSGD(model.parameters(), lr=0.1)
    sync = attach(model, optimizer, text)
    error = error_of(lambda: train_step(model, optimizer, make_batch(rank, 0)))
    sync.detach()
    return error


def test_an_optimizer_that_communicates_needs_workers_that_step_together() -> None:
    """Its collectives would otherwise combine models of different workers, or block."""
    for kinds, text in real(sharded_optimizer, "local:period=4", workers=2):
        assert kinds[0] == "AttachError"
        assert "ShardedSGD (or its closure) communicates in its step" in text
    assert real(sharded_optimizer, "bsp", workers=2) == [([], "nothing was raised")] * 2


def unknown_scaler(rank: int, size: int, enabled: bool) -> tuple[list[str], str]:
    model = make_model(seed=rank, dtype=torch.float32)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    scaler = torch.amp.GradScaler("cpu", enabled=enabled)
    sync = attach(model, optimizer, "local:period=2")
    scaler.scale(loss_of(model, make_batch(rank, 0, dtype=torch.float32))).backward()
    error = error_of(lambda: scaler.step(optimizer))
    sync.detach()
    return error


def test_a_scaler_that_attach_does_not_know_is_refused_at_its_first_step() -> None:
    """The workers would skip different steps without counting them."""
    for kinds, text in run(unknown_scaler, True, workers=2):
        assert kinds[0] == "AttachError"
        assert "attach(..., scaler=scaler)" in text
    assert run(unknown_scaler, False, workers=2) == [([], "nothing was raised")] * 2


def shared_scaler(rank: int, size: int, first: int) -> Any:
    """Train two attached models with one scaler. ``first`` is the one that finishes first."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    models = [make_model(seed=rank) for _ in range(2)]
    optimizers = [OPTIMIZERS["sgd"](model.parameters()) for model in models]
    syncs = [
        attach(model, optimizer, "local:period=2", scaler=scaler)
        for model, optimizer in zip(models, optimizers, strict=True)
    ]
    for step in range(3):
        for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            bad = (rank, step, number) == (1, 1, 0)
            loss = loss_of(model, make_batch(rank, step)) * (float("inf") if bad else 1)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
        scaler.update()
        if step == 1:
            syncs[first].finish()
    syncs[1 - first].finish()
    return [sync.step for sync in syncs], [flat(model) for model in models]


@pytest.mark.parametrize("first", [0, 1])
def test_two_attached_models_may_share_a_scaler(first: int) -> None:
    (counts, models), (same, others) = run(shared_scaler, first, workers=2)
    assert counts == same == ([2, 3] if first == 0 else [3, 2])
    assert torch.equal(models[1 - first], others[1 - first])


def detach_and_again(rank: int, size: int) -> Any:
    results = {}
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for strategy in DETACHED:
        model = make_model(seed=rank)
        optimizer = OPTIMIZERS["momentum"](model.parameters())
        first = attach(model, optimizer, strategy, scaler=scaler)
        train_step(model, optimizer, make_batch(rank, 0))
        dist.barrier()  # a detached worker would end a step that still waits for its vote
        first.detach()
        first.detach()
        plain = copy.deepcopy(model)
        other = OPTIMIZERS["momentum"](plain.parameters())
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for step in range(1, 1 + 3 * (rank + 1)):  # uneven: whoever still averaged would hang
            train_step(model, optimizer, make_batch(rank, step))
            train_step(plain, other, make_batch(rank, step))
        alone = torch.equal(flat(model), flat(plain)) and first.step == 1
        second = attach(model, optimizer, offbeat.LocalSGD(period=1), scaler=scaler)
        train_step(model, optimizer, make_batch(rank, 9))
        second.finish()
        unwatched = not {"step", "unscale_"} & vars(scaler).keys()
        results[str(strategy)] = (alone, unwatched, second.step, flat(model))
    return results


def test_detach_removes_all_hooks_and_attach_works_again() -> None:
    """After detach() training is plain, bit for bit, and a new synchronizer starts from scratch."""
    results = run(detach_and_again, workers=2)
    assert results[0].keys() == {str(strategy) for strategy in DETACHED}
    for name, (alone, unwatched, steps, end) in results[0].items():
        for other in results:
            assert other[name][:3] == (True, True, 1)
        assert (alone, unwatched, steps) == (True, True, 1)
        assert torch.equal(end, results[1][name][3])
