"""Limits of a run, stragglers among real workers, and measured links."""

import statistics
from dataclasses import replace

import pytest
import torch

import workers
from lab import tiny
from offbeat import Compute, Network
from offbeat.lab import step_time, stragglers
from offbeat.lab.compare import run_and_record
from offbeat.lab.job import Job
from offbeat.lab.launch.runners import VirtualCluster
from offbeat.lab.probe import ring
from offbeat.lab.probe.ring import measure_links
from offbeat.lab.results import Result
from offbeat.lab.stragglers import StragglerLoss, parse_slow

PLACE = VirtualCluster(Network("100Mbit/s", latency="1ms"), Compute("1s"))
JOB = Job("tiny", "local:period=3", 2, evaluations=tiny.STEPS)


@pytest.fixture(autouse=True)
def with_tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tiny.RECIPES, "tiny", tiny.RECIPE)


def run(job: Job) -> Result:
    return run_and_record(job, lambda event: None, PLACE)


def test_max_steps_keeps_the_schedule_of_the_whole_run() -> None:
    """The points are the first ones of the whole run."""
    whole, part = run(JOB), run(replace(JOB, max_steps=6, evaluations=6))
    assert [point.step for point in part.points] == [1, 2, 3, 4, 5, 6]
    assert [p.metric for p in part.points] == [p.metric for p in whole.points[:6]]
    assert {one.steps for one in part.stats} == {6}
    assert run(replace(JOB, max_steps=100)).points == whole.points


@pytest.mark.parametrize("strategy", ["local:period=3", "ideal", "async:staleness=2"])
def test_max_seconds_ends_a_run_at_the_next_evaluation(strategy: str) -> None:
    """With steps of 1 s and an evaluation after each, 3.5 s have passed after the fourth."""
    found = run(replace(JOB, strategy=strategy, max_seconds=3.5))
    assert [point.step for point in found.points] == [1, 2, 3, 4]
    assert found.points[-1].seconds == pytest.approx(4, abs=0.1)


def test_a_limit_is_kept_in_the_results() -> None:
    told = run(replace(JOB, max_seconds=3.5)).to_dict()["job"]
    assert (told["max_steps"], told["max_seconds"]) == (None, 3.5)


@pytest.mark.parametrize(
    ("text", "found"), [(None, {}), ("1=2", {1: 2.0}), ("0=1.5,3=2", {0: 1.5, 3: 2.0})]
)
def test_slow_workers_are_named_by_rank(text: str | None, found: dict[int, float]) -> None:
    assert parse_slow(text, 4) == found


def sleeps(rank: int, size: int, slowdown: float) -> list[float]:
    """Return the sleeps of 400 steps, as multiples of the step time; rank 1 is slow."""
    tiny.install()
    step_time.REFERENCE = step_time.Duration(5, 10, 0.1)
    task = tiny.build(JOB.setup())
    batch = torch.zeros(4, 4).double(), torch.zeros(4, 1).double()
    factor = slowdown if rank == 1 else 1.0
    longer = StragglerLoss(task, lambda: iter([batch] * 20), slowdown=factor, jitter=0.2, seed=0)
    slept: list[float] = []
    stragglers.time.sleep = slept.append  # type: ignore[assignment]
    for _ in range(400):
        longer(task.model, batch)
    return [seconds / longer.step_seconds for seconds in slept]


def test_stragglers_sleep_by_slowdown_and_jitter() -> None:
    """Rank 1 is twice as slow; |z| has mean √(2/π)."""
    first, second = workers.run(sleeps, 2.0, workers=2)
    expected = 0.2 * (2 / torch.pi) ** 0.5
    assert statistics.fmean(first) == pytest.approx(expected, rel=0.2)
    assert statistics.fmean(second) == pytest.approx(2 * (1 + expected) - 1, rel=0.1)
    assert min(first) >= 0
    assert min(second) >= 1


def measure(rank: int, size: int) -> tuple[float, float]:
    found = measure_links()
    return found.bytes_per_second, found.latency_seconds


def test_all_workers_measure_the_same_links() -> None:
    """Loopback is faster than a megabyte a second, and a message takes less than a second."""
    one, other = workers.run(measure, workers=2)
    assert one == other
    assert one[0] > 1e6
    assert 0 < one[1] < 1


def test_one_stalled_message_does_not_change_the_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    """The median of 0.4, 4 and 0.4 s counts."""
    taken = iter([0.4, 4.0, 0.4])
    monkeypatch.setattr(ring, "_shift", lambda tensor: 0.0)
    monkeypatch.setattr(ring, "_slowest", lambda seconds: next(taken))
    monkeypatch.setattr(ring, "gather", lambda value, device, what: [value])
    assert measure_links().bytes_per_second == pytest.approx(2**18 / 0.4)
