"""Tables of the studies, on rows made by hand."""

from collections.abc import Sequence
from typing import Any

import pytest
from benchmarks.studies import noniid, settings, strategies

from offbeat.lab.job import Job


class Clock:
    """Rows of runs whose first steps cost more, as SelSync's do."""

    def rows(self, jobs: Sequence[Job]) -> list[dict[str, Any]]:
        rows = []
        for job in jobs:
            steps = job.check().steps
            each = {"bsp": 0.1, "local:period=8": 0.02}[job.strategy]
            rows.append({"steps": steps, "seconds": 0.4 + each * steps})
        return rows


def test_every_schedule_ends_at_the_time_of_comparison():
    """To within a step of 2 seconds, though the first run that asks is off by its slow start."""
    epochs = strategies.fitted_epochs(Clock(), ["bsp", "local:period=8"], 2.0)
    jobs = [strategies.job(strategies.Entry("time", s, e), 1.0, 0) for s, e in epochs.items()]
    bsp, local = Clock().rows(jobs)
    assert bsp["seconds"] == pytest.approx(2.0, abs=0.15)
    assert local["seconds"] == pytest.approx(2.0, abs=0.15)
    assert bsp["steps"] < 20 < 70 < local["steps"]


@pytest.mark.parametrize("steps", [1, 17, 160])
def test_epochs_make_so_many_steps(steps: int):
    epochs = strategies.epochs_for(steps)
    assert Job("digits", "bsp", strategies.WORKERS, epochs=epochs).check().steps == steps


def row(strategy: str, injection: str | None, final: float) -> dict[str, Any]:
    return {"job": {"strategy": strategy, "injection": injection}, "final": final}


def test_an_order_is_shown_only_where_ranges_do_not_overlap():
    """a is above c; b overlaps with both, whatever their medians."""
    values = {"a": (0.90, 0.95), "b": (0.80, 0.91), "c": (0.70, 0.85)}
    rows = [row(name, None, one) for name, pair in values.items() for one in pair]
    text = noniid.apart([*rows, row("bsp", None, 0.99)])[0]
    assert "1 of 3 pairs" in text
    assert text.endswith("overlap: `a` above `c`.")


def test_each_setting_has_rows_with_and_without_it():
    """Every group has rows without its setting, and rows differ."""
    assert len(set(settings.CASES)) == len(settings.CASES)
    bare = {
        "deferred flags": lambda case: "deferred" not in case.strategy,
        "max_interval": lambda case: "max_interval" not in case.strategy,
        "outer momentum": lambda case: "outer" not in case.strategy,
        "optimizer state": lambda case: "optimizer_state" not in case.strategy,
        "LinearScalingWarmup": lambda case: case.schedule == "one",
    }
    for group, is_bare in bare.items():
        cases = [case for case in settings.CASES if case.group == group]
        assert any(map(is_bare, cases))
        assert not all(map(is_bare, cases))


def test_the_schedules_of_linear_scaling():
    """Rates of one worker, 8 times that by warm-up, and at once; a cosine ends all at 1 %."""
    import torch

    rates = {}
    for schedule in ("one", "scaled", "at once"):
        case = settings.Case("LinearScalingWarmup", "bsp", schedule=schedule)
        optimizer, scheduler = settings._optimizer(torch.nn.Linear(1, 1), case, 1.0, 100)
        rates[schedule] = []
        for _ in range(101):
            rates[schedule].append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
    assert rates["one"][0] == pytest.approx(0.05)
    assert rates["scaled"][0] == pytest.approx(0.05)
    assert rates["at once"][0] == pytest.approx(0.4)
    assert rates["scaled"][20] == pytest.approx(rates["at once"][20], rel=0.01)
    assert rates["at once"][100] == pytest.approx(0.004)
    assert rates["one"][100] == pytest.approx(0.0005)
