"""Simulated runs whose scenario lets workers die and join: workers, times, refusals.

``data`` tests that no sample is missing.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lab import tiny
from offbeat import Compute, Network
from offbeat_lab.compare import run_and_record
from offbeat_lab.evaluation import average_over_workers
from offbeat_lab.job import LEASED, Job
from offbeat_lab.launch.elastic import _combined
from offbeat_lab.launch.runners import VirtualCluster
from offbeat_lab.results import Result
from offbeat_lab.scenario import Scenario, ScenarioEvent
from offbeat_lab.train import planned_times
from worlds import simulated

WORKERS, EPOCHS, SAMPLES, BATCH = 4, 10, 96, 4
STEPS = EPOCHS * SAMPLES // BATCH // WORKERS  # of each worker, if all live on
EVENTS = (
    ScenarioEvent(0.2, worker=2, alive=False),
    ScenarioEvent(0.3, worker=4, alive=True),
    ScenarioEvent(0.4, worker=2, alive=True),
)
JOB = Job("tiny", "streaming", WORKERS, partition=LEASED, evaluations=6, timeout_seconds=5.0)
JOB = replace(JOB, scenario=str(Scenario(EVENTS)))


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny, "STEPS", STEPS)


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[float]]:
    """The samples that each worker has used, by rank. A sample is known by its first number."""
    used: dict[int, list[float]] = {}
    real = tiny.loss

    def watched(model: Any, batch: Any) -> Any:
        used.setdefault(dist.get_rank(), []).extend(batch[0][:, 0].tolist())
        return real(model, batch)

    monkeypatch.setattr(tiny, "loss", watched)
    return used


def run(job: Job, **compute: Any) -> tuple[Result, VirtualCluster]:
    place = VirtualCluster(Network("1Gbit/s"), Compute("10ms", **compute))
    return run_and_record(job, lambda event: None, place), place


def test_the_workers_live_as_the_scenario_says(used: dict[int, list[float]]) -> None:
    """Ranks 0 to 3 start at 0, 4 at 0.3 and 5 at 0.4; rank 2 ends at 0.2, all others at the end."""
    result, place = run(JOB)
    assert place.last is not None
    spans = [span for span in place.last.timeline if span.kind == "compute"]
    own = [[span for span in spans if span.rank == rank] for rank in range(6)]
    starts, ends = [each[0].start for each in own], [each[-1].end for each in own]
    assert max(starts[:4]) < 0.02
    assert ends[2] == pytest.approx(0.2)
    # A newcomer waits for a step of the others, 0.05 s for the next generation, and for the model.
    assert 0.3 < starts[4] < 0.4
    assert 0.4 < starts[5] < 0.5
    assert max(ends) - min(ends[:2] + ends[3:]) < 0.025  # about one batch of 10 ms
    assert result.points[-1].seconds == pytest.approx(place.last.seconds, abs=0.02)


def test_evaluations_have_the_times_of_the_training(used: dict[int, list[float]]) -> None:
    """At equal shares of the samples, also for the newcomers. The ideal is faster, by hand.

    240 batches of 10 ms: 4 workers until 0.2 s (80), 3 until 0.3 s (30), 4 until 0.4 s (40), 5.
    """
    result, _ = run(JOB)
    assert [point.step for point in result.points] == [10, 20, 30, 40, 50, 60]
    seconds = [point.seconds for point in result.points]
    assert seconds == sorted(seconds)
    ideal, _ = run(replace(JOB, strategy="ideal"))
    by_hand = [0.1, 0.2, 0.325, 0.42, 0.5, 0.58]
    # The first step that ends after the sample has at most 5 batches.
    late = [point.seconds - t for point, t in zip(ideal.points, by_hand, strict=True)]
    assert all(-1e-9 <= seconds < 0.0101 for seconds in late)
    assert all(own > 0.95 * p.seconds for own, p in zip(seconds, ideal.points, strict=True))
    assert result.seconds < 1.6 * ideal.seconds


def test_equal_runs_have_equal_results() -> None:
    first, second = (run(JOB, jitter=0.3)[0] for _ in range(2))
    assert first.points == second.points
    assert first.stats == second.stats


def test_workers_may_join_after_the_end_and_rank_0_may_die(used: dict[int, list[float]]) -> None:
    events = (ScenarioEvent(0.2, worker=0, alive=False), ScenarioEvent(9.0, worker=4, alive=True))
    result, _ = run(replace(JOB, scenario=str(Scenario(events))))
    assert [point.step for point in result.points] == [10, 20, 30, 40, 50, 60]
    assert result.seconds < 1.5
    assert sorted(used) == [0, 1, 2, 3]


def test_a_worker_that_comes_back_has_its_speed() -> None:
    """Worker 2 needs 40 ms for a step, in both of its processes."""
    events = (ScenarioEvent(0.0, worker=2, speed=0.25), *EVENTS)
    job = replace(JOB, scenario=str(Scenario(events)))
    place = VirtualCluster(Network("1Gbit/s"), planned_times(job, "10ms"))
    run_and_record(job, lambda event: None, place)
    assert place.last is not None
    lengths: dict[int, list[float]] = {}
    for span in place.last.timeline:
        if span.kind == "compute":
            lengths.setdefault(span.rank, []).append(span.end - span.start)
    longest = {rank: max(own) for rank, own in lengths.items()}
    assert longest[4] == pytest.approx(longest[0])
    assert [longest[2], longest[5]] == pytest.approx(2 * [4 * longest[0]])


def test_snapshots_are_combined_as_by_the_workers() -> None:
    """``_combined`` computes what ``average_over_workers`` computes with collectives."""
    generator = torch.Generator().manual_seed(3)
    kinds = (torch.float64, torch.bfloat16, torch.complex64, torch.int64, torch.bool, torch.uint8)
    own = [[(8 * torch.rand(5, generator=generator)).to(kind) for kind in kinds] for _ in range(3)]

    def average(rank: int, size: int) -> list[torch.Tensor]:
        tensors = [tensor.clone() for tensor in own[rank]]
        average_over_workers(tensors, torch.device("cpu"))
        return tensors

    together = simulated(average, workers=3)[0]
    for tensor, expected in zip(map(_combined, *own), together, strict=True):
        assert tensor.dtype == expected.dtype
        torch.testing.assert_close(tensor, expected)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"partition": None}, "others take over data, so add --partition leased"),
        ({"strategy": "downpour"}, "downpour needs all its workers"),
        ({"strategy": "torch:ddp"}, "torch:ddp needs all its workers"),
        ({"max_seconds": 1.0}, "leave --max-seconds out, and set --epochs"),
    ],
)
def test_what_needs_all_workers_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=f"^--scenario with deaths or joins: {text}$"):
        replace(JOB, **changes).check()
    JOB.check()
    replace(JOB, strategy="ideal").check()
