"""The progress of runs: bar and line."""

import io
import re
import time
from dataclasses import replace

import pytest
from rich.console import Console

from lab.test_report import make
from offbeat.cli import view
from offbeat.cli.progress import ProgressLine, show_duration
from offbeat.lab import report
from offbeat.lab.events import Evaluation, EvaluationCount, Start, Step, Waiting
from offbeat.lab.job import Job


def shown(bar: view.Bar) -> tuple[str, float, float | None, str]:
    """Return name, steps, total steps and text of the last bar."""
    task = bar._progress.tasks[-1]
    return task.description, task.completed, task.total, task.fields["metric"]


def test_the_bar_shows_the_current_activity(capsys: pytest.CaptureFixture[str]) -> None:
    """The activity replaces the metric until the next step."""
    with view.Bar() as bar:
        bar.start(Job("digits", "bsp", 2))
        assert shown(bar) == ("bsp", 0, None, "starting the workers")
        bar.event(Waiting("loading the data"))
        assert shown(bar)[3] == "loading the data …"
        bar.event(Start(10, 400))
        assert shown(bar) == ("bsp", 0, 10, "")
        bar.event(Step(1, 0.5))
        bar.event(Waiting("evaluating"))
        assert shown(bar) == ("bsp", 1, 10, "evaluating …")
        assert bar._progress.tasks[-1].fields["seconds"] == "0.5 s of training"
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
    with view.Bar() as bar:
        bar.start(Job("digits", "bsp", 2))
        bar.event(chosen)
    out = " ".join(capsys.readouterr().out.split())
    assert " ".join(words.split()) in out
    assert ("--evaluations" in out) == bool(words)


NAMES = (
    "local:period=8 --sampler defdp --wire int8",
    "selsync:target_lssr=0.9,window=5,max_interval=32",
    "torch:ddp,hook=powersgd,rank=2",
    "async:schedule=eager,staleness=16,outer_momentum=0.9",
)


@pytest.mark.parametrize("tuned", [False, True])
@pytest.mark.parametrize("with_ideal", [False, True])
def test_names_are_not_broken_in_80_columns(
    tuned: bool, with_ideal: bool, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A line ends after a comma, colon or space; in a tuned table, with less room, also after =."""
    monkeypatch.setattr(view.console, "width", 80)
    results = [make(name, [(100, 0.5)]) for name in NAMES]
    if with_ideal:
        results.append(make("ideal", [(100, 0.99)]))
    if tuned:
        results = [
            replace(one, lr_scales=(1, 2), job=replace(one.job, lr_scale=scale))
            for one in results
            for scale in (1.0, 2.0)
        ]
    view.print_narrow_table(report.table(results, ranges=False))
    out = capsys.readouterr().out
    assert "…" not in out
    assert max(map(len, out.splitlines())) <= 80
    for name in NAMES[:-1] if tuned else NAMES:
        for piece in re.split("[,: ]", name):
            parts = piece.split("=") if tuned and len(piece) > 12 else [piece]
            assert all(part in out for part in parts), out


# -- the line about the progress -------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The wall-clock time of progress lines, as a list of one number."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_a_line_tells_of_the_time_since_the_line_before(clock: list[float]) -> None:
    """The wall-clock time per step is twice the training time, because of evaluations."""
    line = ProgressLine(Job("digits", "bsp", 2), 1000, 10.0)
    lines = []
    for number in range(1, 162):
        loss = 1 / number if number % 2 else None
        sent = 100_000 * max(0, number - 81)
        lines.append(line.update(Step(number, number / 8, number / 32, sent, loss)))
        clock[0] += 0.25
    assert {index: text for index, text in enumerate(lines, start=1) if text} == {
        41: "step 41 of 1000, loss 0.02439, waiting 25%, sending 0 bit/s, about 4 min left",
        81: "step 81 of 1000, loss 0.01235, waiting 25%, sending 0 bit/s, about 4 min left",
        121: "step 121 of 1000, loss 0.008264, waiting 25%, sending 6.4 Mbit/s, about 4 min left",
        161: "step 161 of 1000, loss 0.006211, waiting 25%, sending 6.4 Mbit/s, about 3 min left",
    }


@pytest.mark.parametrize(
    ("job", "left"),
    [
        (Job("digits", "bsp", 2), "about 25 s left"),
        (Job("digits", "bsp", 2, max_seconds=30.0), "about 20 s left"),
        (Job("digits", "torch:ddp", 2), "about 25 s left"),
    ],
)
def test_time_left_counts_from_the_first_step_to_the_earliest_end(
    job: Job, left: str, clock: list[float]
) -> None:
    """A resumed run has taken steps before. The waiting time of torch's DDP is unknown."""
    line = ProgressLine(job, 700, 1.0)
    assert line.update(Step(100, 5.0)) is None
    clock[0] += 5
    text = line.update(Step(200, 10.0))
    clock[0] += 0.5
    assert line.update(Step(201, 10.05)) is None
    unknown = job.strategy == "torch:ddp"
    measured = "" if unknown else "waiting 0%, sending 0 bit/s, "
    assert text == f"step 200 of 700, {measured}{left}"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (59, "59 s"),
        (59.6, "1 min"),
        (3500, "58 min"),
        (3599, "1.0 h"),
        (1e6, "277.8 h"),
    ],
)
def test_a_duration_has_one_unit(seconds: float, text: str) -> None:
    assert show_duration(seconds) == text


def test_a_terminal_has_the_line_below_the_bar(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It disappears at the end of the run. Without a terminal it is printed."""
    for terminal in (True, False):
        screen = io.StringIO()
        console = Console(file=screen, force_terminal=terminal, width=120, color_system=None)
        monkeypatch.setattr(view, "console", console)
        with view.Bar() as bar:
            bar.start(Job("digits", "bsp", 2))
            bar.event(Start(10, 400))
            for step in (1, 2):
                bar.event(Step(step, step / 10, 0.0, 0, 0.5))
                clock[0] += 16.0
                bar._progress.refresh()
            wanted = "step 2 of 10, loss 0.5, waiting 0%, sending 0 bit/s, about 2 min left"
            assert (f"bsp  {wanted}\n" if not terminal else f"{wanted}") in screen.getvalue()
            assert bar._progress.line == wanted * terminal
        assert bar._progress.line == ""


def test_finished_runs_and_the_time_left(clock: list[float]) -> None:
    """Skipped runs take no time. The last run has no text."""
    with view.Bar(4) as bar:
        bar.skip(make("bsp", [(1, 0.5)]))
        for number in (2, 3, 4):
            bar.start(Job("digits", "bsp", 2))
            clock[0] += 60.0
            told = bar.runs_done()
            wanted = rf"{number} of 4 runs done at \d\d:\d\d, about {4 - number} min left"
            assert re.fullmatch(wanted if number < 4 else "", told)
    with view.Bar(0) as bar:
        bar.start(Job("digits", "bsp", 2))
        assert re.fullmatch(r"1 runs done at \d\d:\d\d", bar.runs_done())
