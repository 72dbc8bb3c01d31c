"""Runs with ``--partition leased``: samples, schedule, evaluations, time, refusals."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from lab import tiny
from offbeat import Compute, Network
from offbeat_lab import evaluator
from offbeat_lab.compare import run_and_record
from offbeat_lab.events import End, Evaluation, Event, Start, Step
from offbeat_lab.job import LEASED, Job
from offbeat_lab.launch.runners import VirtualCluster
from offbeat_lab.results import Result
from offbeat_lab.train import Worker
from workers import run as on_processes

WORKERS = 4
JOB = Job("tiny", "streaming", WORKERS, partition=LEASED, evaluations=3)


def cluster(**compute: Any) -> VirtualCluster:
    return VirtualCluster(Network("1Gbit/s"), Compute("10ms", **compute))


def steps_of(result: Result) -> list[int]:
    return [stats.steps for stats in result.stats]


@pytest.mark.parametrize("strategy", ["streaming", "bsp", "selsync:delta=0"])
def test_a_run_has_as_many_samples_as_with_equal_shares(strategy: str) -> None:
    """9 steps of 4 workers, with a slow one: 36 batches. The evaluations are at the same steps."""
    job = replace(JOB, strategy=strategy)
    result = run_and_record(job, lambda event: None, cluster(slowdown={2: 3.0}))
    assert sum(steps_of(result)) == tiny.STEPS * WORKERS
    assert [point.step for point in result.points] == [3, 6, 9]
    assert [point.seconds for point in result.points] == sorted(
        point.seconds for point in result.points
    )


def lease_in_processes(rank: int, size: int) -> Any:
    """Return learning rate and position at each batch of this worker, and the events."""
    torch.set_num_threads(1)
    rates: list[float] = []
    positions: list[int | None] = []
    events: list[Event] = []
    real = tiny.loss

    def watched(model: Any, batch: Any) -> Any:
        rates.append(tiny.built[-1].optimizer.param_groups[0]["lr"])
        positions.append(tiny.built[-1].position)
        return real(model, batch)

    tiny.loss = watched
    Worker(replace(JOB, workers=size, step_seconds=0.04, slow="1=5"), events.append).run()
    return rates, positions, events


def test_real_workers_follow_the_position_of_the_run() -> None:
    """The slow worker takes fewer steps, with the learning rates of the same samples."""
    results = on_processes(lease_in_processes, workers=3)
    # The padding measures steps before the run, at position None.
    steps = [
        [position for position in positions if position is not None] for _, positions, _ in results
    ]
    assert sum(map(len, steps)) == tiny.STEPS * 3
    assert len(steps[1]) < min(len(steps[0]), len(steps[2]))
    for (rates, positions, _), own in zip(results, steps, strict=True):
        assert own == sorted(own)
        # The rate of a batch is that of the position after the batch before.
        measured = len(positions) - len(own)
        expected = [tiny.LR * tiny.rate(position) for position in [0, *own[:-1]]]
        assert rates[measured:] == pytest.approx(expected)
    events = results[0][2]
    evaluations = [event.step for event in events if isinstance(event, Evaluation)]
    assert evaluations == [3, 6, 9]
    shown = [event.step for event in events if isinstance(event, Step)]
    assert shown == sorted(shown)
    assert max(shown) <= tiny.STEPS
    assert [event.steps for event in events if isinstance(event, Start)] == [tiny.STEPS]
    (end,) = (event for event in events if isinstance(event, End))
    assert sum(stats.steps for stats in end.stats) == tiny.STEPS * 3


def test_an_evaluation_has_the_mean_time_of_its_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slow worker is a step of its own later. The last time is that of the last worker."""
    seen: dict[str, Any] = {}
    real = evaluator.gather

    def watched(value: Any, device: torch.device, what: str) -> list[Any]:
        every = seen[what] = real(value, device, what)
        return every

    monkeypatch.setattr(evaluator, "gather", watched)
    result = run_and_record(JOB, lambda event: None, cluster(slowdown={2: 4.0}))
    clocks = [dict(map(tuple, own)) for own in seen["the training seconds of all workers"]]
    *early, last = result.points
    assert [point.seconds for point in early] == pytest.approx(
        [sum(clock[point.step] for clock in clocks) / WORKERS for point in early]
    )
    assert early[0].seconds < max(clock[early[0].step] for clock in clocks)
    assert last.seconds == max(clock[last.step] for clock in clocks)


def test_evaluations_of_a_part_of_an_epoch_are_spread_over_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """4 steps of 4 workers are 16 of the 24 batches of an epoch."""
    monkeypatch.setattr(tiny, "STEPS", 4)
    result = run_and_record(replace(JOB, evaluations=4), lambda event: None, cluster())
    steps = [point.seconds / 0.010 for point in result.points]
    assert steps == pytest.approx([1, 2, 3, 4], abs=0.5)


def test_a_time_limit_ends_a_leased_run() -> None:
    """All evaluations so far are there, and the last one is at the mean position."""
    job = replace(JOB, max_seconds=0.055, evaluations=9)
    result = run_and_record(job, lambda event: None, cluster(slowdown={2: 2.0}))
    assert 3 <= result.points[-1].step < 9
    assert sum(steps_of(result)) < tiny.STEPS * WORKERS


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"strategy": "torch:ddp"}, "with torch:ddp"),
        ({"injection": "0.5,0.5"}, "with --injection"),
        ({"workers_per_node": 2}, "with nodes of several workers"),
    ],
)
def test_what_needs_equal_steps_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=f"--partition leased {text}"):
        replace(JOB, **changes).check()
    JOB.check()
