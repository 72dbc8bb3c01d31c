"""Limits of a run, and measured links."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from lab import tiny
from offbeat import Compute, Network
from offbeat_lab.compare import run_and_record
from offbeat_lab.job import Job
from offbeat_lab.launch.runners import VirtualCluster
from offbeat_lab.results import Result
from offbeat_lab.timing.time_limit import TimeLimit
from worlds import run as on_workers

NETWORK = Network("100Mbit/s", latency="1ms")
PLACE = VirtualCluster(NETWORK, Compute("1s"))
JOB = Job("tiny", "local:period=3", 2, evaluations=tiny.STEPS)


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
def test_max_seconds_ends_a_run(strategy: str) -> None:
    """With steps of 1 s, 3.5 s have passed after the fourth.

    The workers of the ideal compare their clocks, and know the result one step later.
    """
    found = run(replace(JOB, strategy=strategy, max_seconds=3.5))
    last = 5 if strategy == "ideal" else 4
    assert [point.step for point in found.points] == list(range(1, last + 1))
    assert found.points[-1].seconds == pytest.approx(last, abs=0.1)


@pytest.mark.parametrize("slow", [0, 1])
def test_the_largest_clock_ends_the_ideal(slow: int) -> None:
    """Steps of 1 s and 2 s: after two it is 4 s, which the workers know after three."""
    place = VirtualCluster(NETWORK, Compute("1s", slowdown={slow: 2.0}))
    job = replace(JOB, strategy="ideal", max_seconds=3.5)
    found = run_and_record(job, lambda event: None, place)
    assert [one.steps for one in found.stats] == [3, 3]
    assert [point.seconds for point in found.points] == pytest.approx([1.5, 3, 4.5])
    whole = run(replace(JOB, strategy="ideal"))
    assert [(p.step, p.metric) for p in found.points] == [
        (p.step, p.metric) for p in whole.points[:3]
    ]


@pytest.mark.parametrize("slow", [0, 1])
@pytest.mark.parametrize("evaluations", [1, 3, tiny.STEPS])
def test_each_worker_ends_by_its_own_clock(evaluations: int, slow: int) -> None:
    """Steps of 1 s and 2 s. Only snapshots that both workers have are evaluated.

    The final evaluation has the mean number of steps.
    """
    place = VirtualCluster(NETWORK, Compute("1s", slowdown={slow: 2.0}))
    job = replace(JOB, strategy="async:staleness=8", max_seconds=3.5, evaluations=evaluations)
    found = run_and_record(job, lambda event: None, place)
    assert [one.steps for one in found.stats] == ([2, 4] if slow == 0 else [4, 2])
    expected = {1: [3], 3: [3], tiny.STEPS: [1, 3]}
    assert [point.step for point in found.points] == expected[evaluations]
    assert found.seconds == pytest.approx(4, abs=0.1)


def test_workers_that_exchange_samples_end_together() -> None:
    """By the largest clock: steps of 1 s and 2 s, so 4 s have passed after the second step."""
    place = VirtualCluster(NETWORK, Compute("1s", slowdown={1: 2.0}))
    job = replace(JOB, strategy="local:period=100", max_seconds=3.5, injection="0.5,0.5")
    found = run_and_record(job, lambda event: None, place)
    steps = {one.steps for one in found.stats}
    assert len(steps) == 1
    assert steps <= {2, 3, 4}  # the workers know the result of a comparison one step later


def ends_together(rank: int, size: int) -> tuple[int, int]:
    """Steps take 1 s, or 2 s on rank 1. Return the last step, for 200 steps and for 500."""
    found = []
    for steps in (200, 500):
        limit = TimeLimit(20.0, steps, alone=False, device=torch.device("cpu"))
        found.append(
            next(step for step in range(1, steps) if limit.is_over(step, step * (1.0 + rank)))
        )
        dist.barrier()
    return found[0], found[1]


def test_workers_that_need_each_other_end_at_the_same_step() -> None:
    """Rank 1 is over at step 10. The next check, 2 or 5 steps later, knows its clock."""
    assert on_workers(ends_together, workers=2) == [(12, 15), (12, 15)]
