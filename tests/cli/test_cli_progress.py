"""The progress of runs: steps, metric, current activity, one clock, and skipped runs."""

import io
import math
from collections.abc import Iterator

import pytest
from rich.console import Console

from lab.test_report import make
from offbeat.cli import progress
from offbeat.lab.events import Evaluation, EvaluationCount, Start, Step, Waiting
from offbeat.lab.job import Job


def shown(bar: progress.Bar) -> tuple[str, float, float | None, str]:
    """Return name, steps, total steps and text of the last bar."""
    task = bar._progress.tasks[-1]
    return task.description, task.completed, task.total, task.fields["metric"]


def test_the_bar_shows_the_current_activity(capsys: pytest.CaptureFixture[str]) -> None:
    """The activity replaces the metric until the next step."""
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
        bar.event(Evaluation(2, 1.0, 0.75, {"test accuracy": 0.75}))
        assert shown(bar) == ("bsp", 2, 10, "test accuracy 0.7500")
        bar.event(Waiting("evaluating"))
        bar.event(Step(3, 1.5))
        assert shown(bar) == ("bsp", 3, 10, "test accuracy 0.7500")
        bar.start(Job("digits", "bsp", 2, seed=1, wire="int8"))
        assert shown(bar) == ("bsp --wire int8 seed 1", 0, None, "starting the workers")


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        (EvaluationCount(24, 0.01), ""),
        (EvaluationCount(6, 1.5), "bsp  evaluating takes 1.5 s: 6 times in this run, so that"),
        (EvaluationCount(1, 40.0), "bsp  evaluating takes 40 s: once in this run, so that"),
    ],
)
def test_the_chosen_number_of_evaluations_is_printed(
    capsys: pytest.CaptureFixture[str], chosen: EvaluationCount, words: str
) -> None:
    """The line names the option; the usual number has no line."""
    with progress.Bar() as bar:
        bar.start(Job("digits", "bsp", 2))
        bar.event(chosen)
    out = " ".join(capsys.readouterr().out.split())
    assert " ".join(words.split()) in out
    assert ("--evaluations" in out) == bool(words)


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The time of the clock, which tests change."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    yield now
    monkeypatch.undo()


def test_the_clock_estimates_the_remaining_time(seconds: list[float]) -> None:
    """All runs count alike, without those skipped; not before a twentieth of a run is done."""
    with progress.Bar(4) as bar:
        bar.skip(make("bsp", [(1, 0.5)]))
        bar.start(Job("digits", "local:period=8", 2))
        assert bar.clock() == "run 2 of 4, 0:00:00 so far"
        bar.event(Start(100, 400))
        seconds[0] += 10
        bar.event(Step(4, 0.5))
        assert bar.clock() == "run 2 of 4, 0:00:10 so far"
        bar.event(Step(50, 0.5))
        assert bar.clock() == "run 2 of 4, 0:00:10 so far, about 50 s left"
        bar.event(Step(100, 1.0))
        seconds[0] += 10
        bar.event(Evaluation(50, 0.5, 0.5, {}))  # of an earlier step, after the training
        assert bar.clock() == "run 2 of 4, 0:00:20 so far, about 40 s left"
        bar.start(Job("digits", "diloco", 2))
        assert bar.clock() == "run 3 of 4, 0:00:20 so far, about 40 s left"
        bar.start(Job("digits", "streaming", 2))
        bar.event(Start(2, 400))
        seconds[0] += 3600
        bar.event(Step(2, 0.5))
        assert bar.clock() == "run 4 of 4, 1:00:20 so far"


def test_the_clock_of_one_run_and_of_a_tuned_comparison(seconds: list[float]) -> None:
    with progress.Bar() as bar:
        bar.start(Job("digits", "bsp", 2))
        bar.event(Start(4, 400))
        seconds[0] += 30
        bar.event(Step(1, 0.5))
        assert bar.clock() == "0:00:30 so far, about 2 min left"
    with progress.Bar(10, at_most=True) as bar:
        bar.start(Job("digits", "bsp", 2))
        bar.event(Start(4, 400))
        seconds[0] += 30
        bar.event(Step(4, 0.5))
        assert bar.clock() == "run 1 of at most 10, 0:00:30 so far, at most about 4 min left"


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


@pytest.mark.usefixtures("seconds")
def test_a_terminal_has_one_clock_and_one_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Finished runs are lines above; in 80 columns nothing but a long name is cut off."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=80, height=25, color_system=None)
    monkeypatch.setattr(progress, "console", console)
    with progress.Bar(2) as bar:
        for strategy in ("bsp", "async:schedule=eager,staleness=16,outer_momentum=0.9"):
            bar.start(Job("digits", strategy, 2))
            bar.event(Start(5000, 400))
            bar.event(Evaluation(5000, 12.5, 0.9, {}))
        lines = [
            line
            for segments in console.render_lines(bar._progress.get_renderable())
            for line in ["".join(s.text for s in segments)]
        ]
        assert [line.rstrip() for line in lines] == [
            "run 2 of 2, 0:00:00 so far",
            "async:schedule=eager,… ━━━━━━━━━━━━ 5000/5000 steps test accuracy 0.9000",
        ]
    assert "bsp  step 5000, 12.5 s of training: test accuracy 0.9000\n" in file.getvalue()


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
