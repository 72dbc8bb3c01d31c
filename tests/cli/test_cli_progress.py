"""The progress of runs: steps, metric, current activity, time left, and skipped runs."""

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


def test_all_runs_count_alike_without_those_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    """The time left follows from these numbers."""
    with progress.Bar(4) as bar:
        every = bar._progress.tasks[0]
        bar.skip(make("bsp", [(1, 0.5)]))
        for number, strategy in enumerate(("local:period=8", "diloco")):
            bar.start(Job("digits", strategy, 2))
            assert (every.description, every.total) == (f"run {number + 2} of 4", 3)
            assert every.completed == number
            bar.event(Start(100, 400))
            bar.event(Step(25, 0.5))
            bar.event(Evaluation(10, 0.2, 0.5, {}))  # of an earlier step, after the training
            assert every.completed == number + 0.25


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
    assert lines == [
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
