"""Comparisons: the same seeds for all methods, consistent files, reproducible numbers."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offbeat import Compute, Network, Stats
from offbeat.errors import OffbeatError
from offbeat_lab import compare as lab
from offbeat_lab.events import End, Evaluation, Event, Start
from offbeat_lab.job import Job
from offbeat_lab.launch.runners import Loopback, Runner, VirtualCluster
from offbeat_lab.results import Result, read_results

STRATEGIES = ("bsp", "local:period=4")
JOB = Job("digits", "bsp", 2, epochs=0.5, seed=5, evaluations=24)
STEPS = 12  # half of 1437 images, by 2 workers with batches of 32


def ignore(event: Event | Job) -> None:
    """Do nothing."""


def test_workers_train_on_processes(tmp_path: Path) -> None:
    """LSSR and bytes are means over both workers. Both strategies share seed and data order."""
    folder = tmp_path / "a" / "b"
    results = lab.compare(
        JOB, STRATEGIES, runner=Loopback(), output=folder, on_start=ignore, on_event=ignore
    )
    assert read_results(folder / "results.jsonl") == results
    bsp, local = results
    assert bsp.job == replace(local.job, strategy="bsp") == JOB
    assert [stats.steps for one in results for stats in one.stats] == [STEPS] * 4
    assert (bsp.lssr, local.lssr) == (0, 0.75)
    assert local.payload_bytes < 0.5 * bsp.payload_bytes
    # The mean of the models after one step each is the step of the mean gradient, up to rounding
    # and BatchNorm's statistics: at most a few of the 360 test images fall differently.
    assert abs(bsp.points[0].metric - local.points[0].metric) <= 3 / 360


# Without processes: events written by hand


class Recorded(Loopback):
    """A runner that records its jobs."""

    def __init__(self, fails: int | None = None) -> None:
        self.jobs: list[Job] = []
        self.fails = fails  # number of the job that fails

    def run(self, job: Job, on_event: Callable[[Event], None]) -> None:
        self.jobs.append(job)
        if len(self.jobs) == self.fails:
            raise OffbeatError("worker 1 was ended by SIGKILL")
        on_event(Start(1, 4))
        on_event(Evaluation(1, 0.5, 0.5, {}))
        on_event(End((Stats(),)))


def test_existing_results_are_not_run_again(tmp_path: Path) -> None:
    """A failed comparison continues, and a finished one can be extended."""
    with pytest.raises(OffbeatError):
        compare(Recorded(fails=4), tmp_path, seeds=3)
    runner, kept = Recorded(), list[Result]()
    results = compare(runner, tmp_path, seeds=3, on_reused=kept.append)
    assert [(job.seed, job.strategy) for job in runner.jobs] == [
        *((8, "async"), (9, "bsp"), (9, "async"))
    ]
    assert [one.job.seed for one in kept] == [7, 7, 8]
    assert results[:3] == kept
    assert read_results(tmp_path / "results.jsonl") == results
    assert compare(Recorded(), tmp_path, seeds=3) == results


def test_a_line_that_was_cut_off_is_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is shortened, not written again: a crash must not lose the complete lines."""
    runner = Recorded()
    compare(runner, tmp_path, seeds=1)
    path = tmp_path / "results.jsonl"
    path.write_bytes(path.read_bytes()[:-10])
    monkeypatch.setattr(Path, "write_bytes", lambda *_: pytest.fail("the file was overwritten"))
    again = Recorded()
    compare(again, tmp_path, seeds=1)
    assert [job.strategy for job in again.jobs] == ["async"]
    assert len(read_results(path)) == 2


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"epochs": 3.0}, "epochs=None"),
        ({"workers": 4}, "workers=2"),
        ({"jitter": 0.5}, "jitter"),
        ({"step_seconds": 0.5}, "step-time=None and not 0.5"),
    ],
)
def test_results_of_another_comparison_are_not_mixed_in(
    change: dict[str, Any], name: str, tmp_path: Path
) -> None:
    """The file is unchanged, and the message names it and the difference."""
    compare(Recorded(), tmp_path, seeds=1)
    before = (tmp_path / "results.jsonl").read_bytes()
    with pytest.raises(ValueError, match=rf"jsonl, line 1, .*{name}.* name another --output"):
        compare(Recorded(), tmp_path, seeds=1, **change)
    assert (tmp_path / "results.jsonl").read_bytes() == before


def compare(
    runner: Runner,
    output: Path | None,
    seeds: int,
    on_reused: Callable[[Result], None] = lambda result: None,
    **change: Any,
) -> list[Result]:
    job = replace(Job("digits", "bsp", 2, seed=7), **change)
    return lab.compare(
        job,
        ("bsp", "async"),
        seeds=seeds,
        runner=runner,
        output=output,
        on_start=ignore,
        on_event=ignore,
        on_reused=on_reused,
    )


def test_a_run_that_diverges_is_a_result(tmp_path: Path) -> None:
    """It is recorded, so that the runs after it take place, as in tuning."""
    job = replace(JOB, epochs=0.25, evaluations=1, lr_scale=1e30)
    runner = VirtualCluster(Network("1Gbit/s"), Compute("10ms"))
    results = lab.compare(
        job, STRATEGIES, runner=runner, output=tmp_path, on_start=ignore, on_event=ignore
    )
    assert len(results) == len(STRATEGIES)
    for result in results:
        assert result.final < 0.3
        assert not result.points[-1].finite
        assert result.points[-1].diverged
