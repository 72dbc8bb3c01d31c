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

    monkeypatch.setattr(step_time, "_train_on", train)
    monkeypatch.setattr(step_time, "time", SimpleNamespace(perf_counter=lambda: clock))
    _, step = step_time.measure_recipe("tiny")
    found = step.seconds, step.low, step.high
    assert found == pytest.approx([one / 1000 for one in expected])
