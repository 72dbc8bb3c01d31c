"""The progress of runs: steps, metric, current activity, one clock, and skipped runs."""

import math
from collections.abc import Iterator

import pytest

from lab.test_report import make
from offbeat_lab.cli import progress
from offbeat_lab.events import Evaluation, Start, Step
from offbeat_lab.job import Job


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The time of the clock, which tests change."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    yield now
    monkeypatch.undo()


def test_the_clock_estimates_the_remaining_time(
    seconds: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    """All runs count alike, without those skipped; not in the first 5 s after the first step."""
    with progress.Bar(4) as bar:
        bar.skip(make("bsp", [(1, 0.5)]))
        bar.start(Job("digits", "local:period=8", 2))
        assert bar.clock() == "run 2 of 4, 0:00:00 so far"
        bar.event(Start(100, 400))
        seconds[0] += 7
        bar.event(Step(1, 0.1))
        seconds[0] += 4
        bar.event(Step(26, 0.5))
        assert bar.clock() == "run 2 of 4, 0:00:11 so far"
        seconds[0] += 6
        bar.event(Step(51, 1.0))
        line = "run 2 of 4, 0:00:17 so far, about 0:00:50 left"
        assert bar.clock() == line
        assert f"step 51 of 100, waiting 0%, sending 0 bit/s, {line}\n" in capsys.readouterr().out
        bar.event(Step(100, 2.0))
        seconds[0] += 10
        bar.event(Evaluation(50, 0.5, 0.5, {}))  # of an earlier step, after the training
        assert bar.clock() == "run 2 of 4, 0:00:27 so far, about 0:00:40 left"
        bar.start(Job("digits", "diloco", 2))
        assert bar.clock() == "run 3 of 4, 0:00:27 so far, about 0:00:40 left"


@pytest.mark.parametrize(
    ("job", "left"),
    [
        (Job("digits", "bsp", 2), "0:00:50"),
        (Job("digits", "bsp", 2, max_seconds=60.0), "0:00:40"),
        (Job("digits", "torch:ddp", 2), "0:00:50"),
    ],
)
def test_time_left_counts_from_the_first_step_to_the_earliest_end(
    job: Job, left: str, seconds: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    """The waiting time of torch's DDP is unknown."""
    with progress.Bar(1) as bar:
        bar.start(job)
        bar.event(Start(700, 400))
        seconds[0] += 20
        bar.event(Step(100, 10.0))
        seconds[0] += 10
        bar.event(Step(200, 20.0))
        assert bar.clock() == f"0:00:30 so far, about {left} left"
    measured = "" if job.strategy == "torch:ddp" else "waiting 0%, sending 0 bit/s, "
    line = f"step 200 of 700, {measured}0:00:30 so far, about {left} left\n"
    assert capsys.readouterr().out == f"{job.strategy}  {line}"


def test_a_line_tells_of_the_time_since_the_line_before(
    seconds: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    """The wall-clock time per step is twice the training time, because of evaluations."""
    with progress.Bar() as bar:
        bar.start(Job("digits", "bsp", 2))
        bar.event(Start(1000, 400))
        for number in range(1, 162):
            loss = 1 / number if number % 2 else None
            sent = 100_000 * max(0, number - 81)
            bar.event(Step(number, number / 8, number / 32, sent, loss))
            seconds[0] += 0.25
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(", 0:00:")[0] for line in lines] == [
        "bsp  step 41 of 1000, loss 0.02439, waiting 25%, sending 0 bit/s",
        "bsp  step 81 of 1000, loss 0.01235, waiting 25%, sending 0 bit/s",
        "bsp  step 121 of 1000, loss 0.008264, waiting 25%, sending 6.4 Mbit/s",
        "bsp  step 161 of 1000, loss 0.006211, waiting 25%, sending 6.4 Mbit/s",
    ]


def test_skipped_runs_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """It is printed before the next run, or at the end."""
    for starts, at_most, most in ((True, False, "8"), (False, True, "at most 8")):
        with progress.Bar(8, at_most=at_most) as bar:
            for _ in range(3):
                bar.skip(make("bsp", [(1, 0.5)]))
            if starts:
                bar.start(Job("digits", "bsp", 2))
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == f"runs in the results already: 3 of {most}"
        assert len(lines) == 1 + starts


def test_a_diverged_evaluation_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.Bar() as bar:
        bar.start(Job("digits", "bsp", 2))
        bar.event(Start(2, 400))
        bar.event(Evaluation(1, 0.5, math.nan, {}))
        bar.event(Evaluation(2, 1.0, 0.1, {}, finite=False))
    assert capsys.readouterr().out == (
        "bsp  step 1, 0.5 s of training: test accuracy nan (diverged)\n"
        "bsp  step 2, 1.0 s of training: test accuracy 0.1000 (diverged)\n"
    )
