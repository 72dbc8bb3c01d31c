"""Controlled step times of real workers, by a clock written by hand."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lab import tiny
from lab.test_report import make
from offbeat import Compute, simulate
from offbeat.units import show_seconds
from offbeat_lab import report
from offbeat_lab.recipes import Setup
from offbeat_lab.timing import padding
from offbeat_lab.timing.padding import PaddedLoss, parse_slow


class Clock:
    """A clock that advances only by sleeps, and by ``compute``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 0.0
        self.sleeps: list[float] = []
        self.oversleep = 0.0
        monkeypatch.setattr(padding, "now", lambda device: self.seconds)
        monkeypatch.setattr(padding, "time", SimpleNamespace(sleep=self.sleep))

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.seconds += seconds + self.oversleep

    def measure(self, monkeypatch: pytest.MonkeyPatch, forward: float, rest: float) -> None:
        """Let the measurement before the run train 13 steps of these times."""
        clock = self

        class Local:
            def __init__(self, task: Any, batches: Any, duration: Any) -> None:
                self._task = task

            def measure(self) -> None:
                for _ in range(13):
                    self._task.loss(self._task.model, forward)
                    clock.seconds += rest

        monkeypatch.setattr(padding, "LocalTraining", Local)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def padded(
    clock: Clock, step_seconds: float, *, seed: int = 0, rank: int = 0, **settings: Any
) -> tuple[Any, PaddedLoss]:
    task = tiny.build(Setup(1, 1.0))

    def loss(model: nn.Module, seconds: float) -> Tensor:  # the batch is the forward time
        clock.seconds += seconds
        return torch.zeros(())

    task.loss = loss
    compute = Compute(step_seconds, **settings)
    task.loss = one = PaddedLoss(task, compute, rank=rank, seed=seed)
    one.measure(task, lambda: ())
    return task, one


def on_one_worker(function: Any) -> Any:
    return simulate(function, workers=1).results[0]


def test_a_step_takes_the_planned_time(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward 2 s and the rest 3 s, padded to 10 s; sleeping too long shortens the next sleep."""
    clock.measure(monkeypatch, 2.0, 3.0)

    def train() -> PaddedLoss:
        task, one = padded(clock, 10.0)
        for _ in range(3):
            start = clock.seconds
            task.loss(task.model, 2.0)
            clock.seconds += 3.0
            assert clock.seconds - start == pytest.approx(10.0)
        clock.oversleep = 0.5
        task.loss(task.model, 2.0)
        task.loss(task.model, 2.0)
        return one

    one = on_one_worker(train)
    assert clock.sleeps == pytest.approx([5.0, 5.0, 5.0, 5.0, 4.5])
    assert (one.steps, one.late_steps, one.planned_seconds) == (5, 0, 50.0)


def test_late_steps_are_counted(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward pass of one of three steps takes 8 s: with the rest of over 3 s it is late."""
    clock.measure(monkeypatch, 2.0, 3.0)

    def train() -> int:
        task, one = padded(clock, 10.0)
        for forward in (2.0, 8.0, 2.0):
            task.loss(task.model, forward)
        return one.late_steps

    assert on_one_worker(train) == 1
    assert clock.sleeps[1] == 0.0


def test_planned_times_are_those_of_the_simulator(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With jitter, and a worker that is twice as slow from 20 s after the first step to 50 s."""
    clock.measure(monkeypatch, 1e-9, 0.0)

    def slowdown(rank: int, step: int, now: float) -> float:
        assert rank == 1
        return 2.0 if 20 <= now < 50 else 1.0

    def train() -> float:
        task, one = padded(clock, 10.0, jitter=0.3, slowdown=slowdown, seed=5, rank=1)
        clock.seconds += 100.0
        for _ in range(6):
            task.loss(task.model, 0.0)
        return one.planned_seconds

    compute, expected = Compute(10.0, jitter=0.3, slowdown=slowdown), list[float]()
    for step in range(6):
        expected.append(compute.seconds(1, step, sum(expected), 5))
    assert on_one_worker(train) == pytest.approx(sum(expected))
    assert clock.sleeps == pytest.approx(expected)


def test_a_worker_that_joins_has_the_measurement_and_the_clock_of_another(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward 2 s, the rest 3 s. Its first step is 30 s after that of the other: twice as slow."""
    clock.measure(monkeypatch, 2.0, 3.0)

    def train() -> None:
        task, one = padded(clock, 10.0)
        task.loss(task.model, 2.0)
        clock.seconds += 23.0
        other, _ = padded(clock, 10.0)
        compute = Compute(10.0, slowdown=lambda rank, step, now: 2.0 if now >= 30 else 1.0)
        joined = PaddedLoss(other, compute, rank=4, seed=0)
        joined._loss = task.loss._loss
        joined.load(one.state())
        joined(other.model, 2.0)

    on_one_worker(train)
    assert clock.sleeps == pytest.approx([5.0, 15.0])


@pytest.mark.parametrize(
    ("text", "found"), [(None, {}), ("1=2", {1: 2.0}), ("0=1.5,3=2", {0: 1.5, 3: 2.0})]
)
def test_slow_workers_are_named_by_rank(text: str | None, found: dict[int, float]) -> None:
    assert parse_slow(text, 4) == found


def test_reports_name_the_step_time_and_methods_with_late_steps() -> None:
    """A note appears above 1 %."""
    curve = [(10.0, 0.5), (20.0, 0.95)]
    runs = []
    for text, late in (("bsp", 1), ("async", 5)):
        run = make(text, curve)
        stats = replace(run.stats[0], steps=100, details={"late_steps": late})
        job = replace(run.job, step_seconds=0.05)
        runs.append(replace(run, job=job, stats=(stats,)))
    assert [run.late_share for run in runs] == [0.01, 0.05]
    assert f"steps padded to {show_seconds(0.05)}" in report.caption(runs)
    assert "Steps that took longer to compute than --step-time: async 5 %." in report.notes(runs)
    assert report.notes(runs[:1]) == []
