"""Training that continues when real workers die and join."""

import gc
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offbeat
from cells import some
from gathered import die, gather_in_order, kill_at, store
from loops import start
from offbeat.elastic import membership_changes
from offbeat.errors import CommunicationError
from problems import flat, make_batch, train_step
from transport.communicators import held
from workers import run

STRATEGIES = [
    "bsp",
    "local:period=3",
    "selsync:target_lssr=0.5",
    "async:staleness=4",
    "streaming",
    "diloco:period=4",
]
VISITORS = 10


def stumble() -> None:
    """Let this worker fail when it first begins a generation."""
    real = membership_changes.Wire

    def fail(*args: Any) -> Any:
        membership_changes.Wire = real
        raise CommunicationError("stumbled")

    membership_changes.Wire = fail


def train(rank: int, size: int, strategy: str, stumbles: bool = False) -> Any:
    """Rank 1 dies at step 10, then a worker joins; all take some more steps."""
    gather_in_order(rank, size)
    if rank == size:
        store().wait(["died"])
        if stumbles:
            stumble()
    model, optimizer, sync = start(rank, strategy, timeout_seconds=100)
    begun, more, deadline = sync.step, 8, time.monotonic() + 40
    while more:
        assert time.monotonic() < deadline, sync.stats
        if rank == 1 and sync.step == 10:
            die()
        train_step(model, optimizer, make_batch(rank, sync.step))
        members = [n for n in range(size + 1) if n != 1]
        more -= sync.stats.details["members"] == members
        time.sleep(0.002)
    sync.finish()
    return flat(model), begun, sync.step, dict(sync.stats.details)


def check(results: list[Any], least: int = 0) -> None:
    """All end with one model and the same members; the newcomer begins at the others' step."""
    first, _, *others = results
    model, begun, steps, details = first
    assert begun == 0
    assert steps >= least + 8
    assert details["members"] == [0, 2, 3, 4]
    assert model.isfinite().all()
    for other, _, _, others_details in others:
        assert torch.equal(other, model)
        assert others_details["members"] == [0, 2, 3, 4]
    assert others[-1][1] >= least


@pytest.mark.parametrize("strategy", some(STRATEGIES, 0, 4))
def test_training_survives_a_death_and_a_join(strategy: str) -> None:
    """One worker is killed, one joins."""
    least = 10 if strategy == "bsp" else 1  # in the others, workers go apart
    check(run(train, strategy, workers=4, newcomers=1, may_die=(1,)), least)


def test_a_newcomer_may_fail_before_its_first_generation_begins() -> None:
    """It enters the next generation, still with nothing to contribute, long before a time-out."""
    check(run(train, "streaming", True, workers=4, newcomers=1, may_die=(1,)))


def visit(rank: int, size: int, strategy: str) -> Any:
    """Newcomers come each 0.4 s. Half of them are admitted, and vanish half a second later.

    The others vanish in their first step. The mean of the gradients is 2 for all members.
    Returns the model, its number of steps, and the steps per second before and with newcomers.
    """
    gather_in_order(rank, size)
    kept, gone = store(), [f"gone{n}" for n in range(size, size + VISITORS)]
    if rank >= size:
        kept.wait(["come"])
        time.sleep(0.4 * (rank - size))
        if rank % 2:
            kill_at("before it opens", gone[rank - size], after_seconds=0.5)
    parameter = nn.Parameter(torch.zeros(1000))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    chosen = offbeat.parse_strategy(strategy)
    sync = offbeat.attach(nn.ParameterList([parameter]), optimizer, chosen, timeout_seconds=100)

    def step() -> None:
        time.sleep(0.01)
        optimizer.zero_grad()
        (parameter.sum() * (2.0 if rank >= size else rank + 1)).backward()
        optimizer.step()

    def rate_until(*keys: str) -> float:
        began, first = time.monotonic(), sync.step
        while not (kept.check(list(keys)) and sync.size == size):
            assert time.monotonic() < began + 50, sync.stats
            step()
            if rank >= size:
                die(gone[rank - size])
            if rank == 0 and sync.step == 100:
                kept.set("come", "")
        return (sync.step - first) / (time.monotonic() - began)

    rates = rate_until("come"), rate_until(*gone)
    if rank == 0:
        kept.set("end", str(sync.step + 50))
    rate_until("end")
    while sync.step < int(kept.get("end")):
        step()
    sync.finish()
    return parameter.detach(), sync.step, rates


def visited(strategy: str) -> list[Any]:
    newcomers = tuple(range(3, 3 + VISITORS))
    return run(visit, strategy, workers=3, newcomers=VISITORS, may_die=newcomers)[:3]


@pytest.mark.parametrize("strategy", some(["bsp", "local:period=4", "streaming"], 0))
def test_newcomers_that_vanish_change_no_value(strategy: str) -> None:
    """Every step of the three workers counts once. Under BSP the model is known."""
    found = visited(strategy)
    for model, steps, _ in found:
        assert torch.equal(model, found[0][0])
        assert steps == found[0][1]
        if strategy == "bsp":
            assert model.tolist() == [-2.0 * steps] * 1000
        assert bool((model >= -3 * steps).all() and (model <= -steps).all())


@pytest.mark.quiet
@pytest.mark.parametrize("strategy", ["bsp", "streaming"])
def test_newcomers_that_vanish_leave_half_of_the_time(strategy: str) -> None:
    """At least half of the steps take place that the same time allows without newcomers."""
    for _, _, (before, meanwhile) in visited(strategy):
        assert meanwhile > before / 2


def outlive(rank: int, size: int, others: int) -> Any:
    """Rank 0 outlives workers that join and die in turn. Returns what it holds after each."""
    gather_in_order(rank, size)
    if rank > 1:
        store().wait([f"alone {rank - 1}"])
    model, optimizer, sync = start(rank, offbeat.LocalSGD(period=4), timeout_seconds=100)

    def train(workers: int) -> None:
        steps, deadline = 6, time.monotonic() + 40
        while steps:
            assert time.monotonic() < deadline, sync.stats
            train_step(model, optimizer, make_batch(rank, sync.step))
            steps -= sync.size == workers

    found: list[tuple[int, ...]] = []
    for number in range(others):
        train(2)
        if rank:
            die()
        train(1)
        store().set(f"alone {number + 1}", "")
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        found.append((*held(found[0][:2] if found else (0, 0)), pages * os.sysconf("SC_PAGESIZE")))
    sync.finish()
    return found


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_a_worker_that_others_join_and_leave_keeps_nothing_of_them() -> None:
    """Neither threads, descriptors nor memory, after the first two."""
    dead = tuple(range(1, 7))
    first = run(outlive, 6, workers=1, newcomers=6, may_die=dead)[0]
    threads, descriptors, size = (b - a for a, b in zip(first[1], first[-1], strict=True))
    assert threads <= 1
    assert descriptors <= 1
    assert size < 6e6
