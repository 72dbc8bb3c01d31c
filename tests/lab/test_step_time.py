"""Step times measured on this machine."""

import contextlib
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lab import tiny
from offbeat_lab.recipes import Setup
from offbeat_lab.timing import step_time


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


def test_the_step_time_is_robust_to_other_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Milliseconds on a made-up clock. The five warm-up steps and a few long steps do not count."""
    durations = iter([1000.0] * 5 + [6.0] * 15 + [5.0] * 13 + [90.0] * 2)
    clock = 0.0

    def train(task: Any, batch: Any) -> None:
        nonlocal clock
        clock += next(durations) / 1000

    monkeypatch.setattr(step_time, "_train_on", train)
    monkeypatch.setattr(step_time, "time", SimpleNamespace(perf_counter=lambda: clock))
    assert step_time.measure_recipe("tiny") == pytest.approx((0.005, 0.005, 0.006))
