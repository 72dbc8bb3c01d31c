"""Training that continues when real workers die and join."""

import gc
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import offbeat
from cells import some
from gathered import die, gather_in_order, store
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
