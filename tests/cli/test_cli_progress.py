"""The progress of runs: steps, metric, current activity, time left, and skipped runs."""

import io
import math
import re
from collections.abc import Iterator

import pytest
from rich.console import Console

from lab.test_report import make
from offbeat_lab.cli import progress
from offbeat_lab.events import Evaluation, Start, Step, Waiting
from offbeat_lab.job import Job


def shown(bar: progress.Bar) -> tuple[str, float, float | None, str]:
    """Return name, steps, total steps and text of the last bar."""
    task = bar._progress.tasks[-1]
    return task.description, task.completed, task.total, task.fields["text"]


def test_the_bar_shows_the_current_activity(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.Bar() as bar:
        bar.start(Job("digits", "bsp", 2))
        assert shown(bar) == ("bsp", 0, None, "starting the workers")
        bar.event(Waiting("loading the data"))
        assert shown(bar)[3] == "loading the data …"
        bar.event(Start(10, 400))
        assert shown(bar) == ("bsp", 0, 10, "")
        bar.event(Step(1, 0.5))
        bar.event(Waiting("evaluating"))
        assert shown(bar) == ("bsp", 1, 10, "evaluating …")
        bar.event(Evaluation(1, 1.0, 0.75, {"test accuracy": 0.75}))
        assert shown(bar) == ("bsp", 1, 10, "test accuracy 0.7500")
        bar.start(Job("digits", "bsp", 2, seed=1, wire="int8"))
        assert shown(bar) == ("bsp --wire int8 seed 1", 0, None, "starting the workers")


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


def test_a_terminal_has_two_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    """Finished runs are lines above; in 80 columns nothing but a long name is cut off."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=80, height=25, color_system=None)
    monkeypatch.setattr(progress, "console", console)
    with progress.Bar(2) as bar:
        for strategy in ("bsp", "async:schedule=eager,staleness=16,outer_momentum=0.9"):
            bar.start(Job("digits", strategy, 2))
            bar.event(Start(5000, 400))
            bar.event(Step(5000, 12.5))
            bar.event(Evaluation(5000, 12.5, 0.9, {}))
        lines = [
            "".join(s.text for s in segments).rstrip()
            for segments in console.render_lines(bar._progress.get_renderable())
        ]
        assert len(lines) == 2
        assert lines[0].startswith("run 2 of 2")
        assert re.fullmatch(r"async:\S*… ━{12} 5000/5000 \S+ \S+ test accuracy 0\.9000", lines[1])
    for name in ("bsp", "outer_momentum=0.9"):
        line = f"{name}  step 5000, 12.5 s of training: test accuracy 0.9000\n"
        assert line in file.getvalue()


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
