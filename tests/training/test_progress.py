"""Warnings and errors about workers that train differently: steps and final models."""

import gc
import itertools
import logging
import re
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist

from loops import attach, error_of, sgd
from offbeat import Compute, Network, simulate
from offbeat.simulate import Kill
from offbeat.training.checks.unfinished import UnfinishedWarning
from problems import flat, make_batch, make_model, train_step
from worlds import simulated

STRATEGIES = ["bsp", "local:period=4", "diloco:period=5", "streaming:staleness=8", "selsync"]


def logged(caplog: pytest.LogCaptureFixture, pattern: str) -> list[str]:
    """Return the warnings that contain ``pattern``."""
    texts = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    return [text for text in texts if re.search(pattern, text)]


# -- consensus() on one rank -----------------------------------------------------------------------


def evaluate_on_rank_0(text: str, steps: int, first: int, everywhere: bool) -> Any:
    """Rank 0 evaluates after ``first`` steps. A step takes a second of virtual time."""
    rank = dist.get_rank()
    model = make_model(seed=rank)
    optimizer = sgd(model)

    def train() -> None:
        with attach(model, optimizer, text) as sync:
            for step in range(steps):
                train_step(model, optimizer, make_batch(rank, step))
                if step + 1 == (first if rank == 0 else steps) and (everywhere or rank == 0):
                    with sync.consensus():
                        pass

    return error_of(train), flat(model)


def slowly(*args: Any) -> list[Any]:
    work = lambda: evaluate_on_rank_0(*args)  # noqa: E731
    return simulate(work, workers=3, network=Network("1Gbit/s"), compute=Compute("1s")).results


@pytest.mark.parametrize("text", STRATEGIES)
def test_a_consensus_on_one_rank_warns(text: str, caplog: pytest.LogCaptureFixture) -> None:
    """Warnings come at doubling intervals, and an error when the others end training."""
    for (kinds, error), _ in slowly(text, 45, 3, False):
        assert kinds[0] == "MismatchError", error
    texts = logged(caplog, "rank 0 has waited")
    found = [re.search(r"for (\d+) s; the other workers have taken (\d+) steps", t) for t in texts]
    numbers = [(int(m[1]), int(m[2])) for m in found if m is not None]
    assert len(numbers) == len(texts) >= 2
    for (early, _), (late, _) in itertools.pairwise(numbers):
        assert late >= 10 > 5 <= early
        assert late > early
    for seconds, steps in numbers:  # two workers with a step each second, at its beginning
        assert steps >= 10
        assert abs(steps - 2 * seconds) <= 2 * 10, (
            "the first summed votes are up to one period late"
        )


@pytest.mark.parametrize("text", ["local:period=4", "streaming:staleness=8"])
def test_workers_that_all_enter_are_warned_but_not_stopped(
    text: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if one worker ends training before the first consensus of another one."""
    results = slowly(text, 45, 3, True)
    assert [kinds for (kinds, _), _ in results] == [[]] * 3
    assert logged(caplog, "rank 0 has waited")
    gc.collect()  # synchronizers of earlier tests may warn when they are collected
    caplog.clear()
    results = slowly(text, 20, 20, False)  # equal steps: ranks 1 and 2 are in finish() by then
    assert [kinds for (kinds, _), _ in results] == [[]] * 3
    assert not logged(caplog, "")
    for _, model in results:
        assert torch.equal(model, results[0][1])


# -- finish() --------------------------------------------------------------------------------------


def by_hand(rank: int, size: int, text: str, steps: int) -> Any:
    """Change the parameters outside of ``optimizer.step``, as word_language_model does."""
    model = make_model(seed=rank)
    optimizer = sgd(model, lr=0.0)
    sync = attach(model, optimizer, text, wire="float32")
    for step in range(steps):
        train_step(model, optimizer, make_batch(rank, step))
    for p in model.parameters():
        p.data.add_(0.01 * (rank + 1))
    sync.finish()
    return flat(model)


@pytest.mark.parametrize("text", ["bsp", "diloco:period=10"])
def test_changes_by_hand_are_reported(text: str, caplog: pytest.LogCaptureFixture) -> None:
    """Neither strategy averages them: the final models differ."""
    models = simulated(by_hand, text, 0, workers=3)
    assert not torch.equal(models[0], models[1])
    assert len(logged(caplog, "final model of rank 1, 2 differs from that of rank 0")) == 1


def test_averaged_changes_are_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    models = simulated(by_hand, "local:period=2", 3, workers=3)
    assert torch.equal(models[0], models[1])
    assert not logged(caplog, "")


def forget(rank: int, size: int, step: bool) -> None:
    model = make_model(seed=rank)
    optimizer = sgd(model)
    attach(model, optimizer, "local:period=1")
    if step:
        train_step(model, optimizer, make_batch(rank, 0))


def test_a_forgotten_finish_is_reported(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the model is freed, or at exit. Silent without a step, and after an exception."""
    for steps in (False, True):
        simulated(forget, steps, workers=2)
        gc.collect()
        assert len(logged(caplog, r"has taken 1 steps and has called neither finish")) == 2 * steps
    caplog.clear()
    owners = [by_hand, forget]
    warnings = [UnfinishedWarning(owner, 3) for owner in owners]
    warnings[1].steps = 7
    with monkeypatch.context() as patch:
        patch.setattr(sys, "last_value", KeyError(), raising=False)
        warnings[1]._warn()
    assert not logged(caplog, "")
    for warning in warnings:
        warning._warn()
        warning.cancel()
    assert len(logged(caplog, "rank 3 has taken 7 steps")) == 1


@pytest.mark.parametrize("text", ["bsp", "streaming"])
def test_a_worker_that_a_simulation_ends_is_not_reported(
    text: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is killed while it computes. The others finish."""

    def train() -> None:
        model = make_model(seed=dist.get_rank())
        optimizer = sgd(model)
        sync = attach(model, optimizer, text, min_workers=1)
        for step in range(4):
            train_step(model, optimizer, make_batch(0, step))
        sync.finish()

    simulate(train, workers=3, compute=Compute("1s"), faults=[Kill(worker=1, at="2.5 s")])
    gc.collect()
    assert not logged(caplog, "has called neither finish")
