"""Calibrations measure the machine's speed during a run and do not affect the run."""

import contextlib
import random
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import workers
from lab import tiny
from offbeat import Compute, Network
from offbeat.lab import step_time
from offbeat.lab.compare import run_and_record
from offbeat.lab.events import Calibration, Evaluation, Event
from offbeat.lab.job import Job
from offbeat.lab.launch.runners import VirtualCluster
from offbeat.lab.recipes import Setup
from offbeat.lab.train import train_worker

METHODS = ("ideal", "streaming:parts=2", "torch:ddp")
SECONDS = 0.15  # of a calibration


def noisy_loss(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return a loss that draws from torch's generator, as dropout does, and sleeps 10 ms."""
    time.sleep(0.01)
    inputs, targets = batch
    noise = 0.1 * torch.randn(inputs.shape, dtype=inputs.dtype)
    return nn.functional.mse_loss(model(inputs + noise), targets)


def train(job: Job) -> tuple[list[Event], float]:
    events: list[Event] = []
    began = time.perf_counter()
    train_worker(job, events.append)
    return events, time.perf_counter() - began


def train_with_and_without(rank: int, size: int) -> dict[str, tuple[Any, Any]]:
    """Run every method, without and with calibrations, in one process group."""
    tiny.install()
    tiny.loss = noisy_loss  # type: ignore[assignment]
    step_time.REFERENCE = step_time.Duration(5, 10, 0.1)
    step_time.CALIBRATION = step_time.Duration(2, 5, SECONDS)
    found = {}
    for text in METHODS:
        job = Job("tiny", text, size, evaluations=3, timeout_seconds=20)
        found[text] = train(job), train(replace(job, measure_alone=True))
    return found


@pytest.fixture(scope="module")
def runs() -> dict[str, tuple[Any, Any]]:
    """Rank 0's events and wall time by method, without calibrations and with them."""
    found: dict[str, tuple[Any, Any]] = workers.run(train_with_and_without, workers=2)[0]
    return found


@pytest.mark.sampled
@pytest.mark.parametrize("text", METHODS)
def test_calibrations_do_not_change_a_run(text: str, runs: dict[str, tuple[Any, Any]]) -> None:
    """The metrics are the same bits; calibrations precede training and occur at each evaluation."""
    (without, _), (events, _) = runs[text]
    points, expected = (
        [(one.step, one.metrics) for one in told if isinstance(one, Evaluation)]
        for told in (events, without)
    )
    assert [step for step, _ in points] == [3, 6, 9]
    if not text.startswith("streaming"):  # which meets when the links allow it
        assert points == expected
    taken = [one for one in events if isinstance(one, Calibration)]
    assert [one.step for one in taken] == [0, 3, 6, 9]
    assert not [one for one in without if isinstance(one, Calibration)]


@pytest.mark.sampled
@pytest.mark.parametrize("text", METHODS)
def test_calibrations_do_not_count_as_training_time(
    text: str, runs: dict[str, tuple[Any, Any]]
) -> None:
    """Steps sleep for 10 ms: nine steps are shorter than one of the four calibrations."""
    _, (events, wall) = runs[text]
    for one in events:
        if isinstance(one, Calibration):
            assert 0.01 < one.step_seconds < 0.1
    last = [one for one in events if isinstance(one, Evaluation)][-1]
    assert 0.09 < last.seconds < wall - 4 * SECONDS


def test_the_state_is_restored_after_an_error() -> None:
    """An interrupted measurement leaves the model and the random state of the run."""
    task = tiny.build(Setup(workers=1, epochs=1))
    before = [parameter.clone() for parameter in task.model.parameters()]
    random.seed(3)
    expected = random.Random(3).random()
    with contextlib.suppress(KeyboardInterrupt), step_time._state_restored(task):
        random.random()
        with torch.no_grad():
            next(task.model.parameters()).add_(1)
        raise KeyboardInterrupt
    for parameter, value in zip(task.model.parameters(), before, strict=True):
        assert torch.equal(parameter, value)
    assert random.random() == expected


@pytest.mark.parametrize(
    ("attempts", "expected"),
    [
        # 15 steps of 6 ms, one of them long: the first attempt is accepted.
        ([[6] * 14 + [90], [1] * 15], (6, 6, 6)),
        # Steps that take 3 s at first: lower quartile of the second attempt, whose spread is small.
        ([[3000] * 5 + [6] * 10, [7] * 5 + [5] * 5 + [6] * 5], (5, 5, 7)),
        # Never steady: the attempt with the smallest quartile of three, with its quantiles.
        ([[9, 90, 90] * 5, [7, 70, 70] * 5, [8, 80, 80] * 5, [1] * 15], (7, 7, 70)),
    ],
)
def test_the_step_time_is_robust_to_other_load(
    monkeypatch: pytest.MonkeyPatch, attempts: list[list[int]], expected: tuple[float, ...]
) -> None:
    """Milliseconds on a made-up clock. The five warm-up steps take 1 s and do not count."""
    durations = iter([1000.0] * 5 + [float(one) for attempt in attempts for one in attempt])
    clock = 0.0

    def train(task: Any, batch: Any) -> None:
        nonlocal clock
        clock += next(durations) / 1000

    monkeypatch.setitem(tiny.RECIPES, "tiny", tiny.RECIPE)
    monkeypatch.setattr(step_time, "_train_on", train)
    monkeypatch.setattr(step_time, "time", SimpleNamespace(perf_counter=lambda: clock))
    _, step = step_time.measure_recipe("tiny")
    found = step.seconds, step.low, step.high
    assert found == pytest.approx([one / 1000 for one in expected])


def test_simulated_workers_do_not_calibrate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their speed is given."""
    monkeypatch.setitem(tiny.RECIPES, "tiny", tiny.RECIPE)
    job = Job("tiny", "bsp", 2, evaluations=3, measure_alone=True)
    place = VirtualCluster(Network("1Gbit/s"), Compute("10ms"))
    found = run_and_record(job, lambda event: None, place)
    assert found.turns == ()
    assert [one.metric for one in found.points] == [
        one.metric
        for one in run_and_record(
            replace(job, measure_alone=False), lambda event: None, place
        ).points
    ]


def uneven(rank: int, size: int) -> list[float]:
    tiny.install()
    tiny.loss = noisy_loss  # type: ignore[assignment]
    step_time.REFERENCE = step_time.Duration(5, 10, 0.1)
    step_time.CALIBRATION = step_time.Duration(2, 5, SECONDS)
    job = Job("tiny", "bsp", size, evaluations=1, timeout_seconds=20, measure_alone=True)
    events, _ = train(replace(job, slow="1=3"))
    return [one.step_seconds for one in events if isinstance(one, Calibration)]


def test_stragglers_are_slow_in_calibrations() -> None:
    """The mean over workers with steps of 10 and 30 ms."""
    found, _ = workers.run(uneven, workers=2)
    assert len(found) == 2
    for one in found:
        assert 0.018 < one < 0.04
