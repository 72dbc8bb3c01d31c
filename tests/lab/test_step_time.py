"""Step times measured on this machine."""

from types import SimpleNamespace
from typing import Any

import pytest

from offbeat_lab.timing import step_time


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
