"""The progress bar: steps, metric, current activity."""

import re
from dataclasses import replace

import pytest

from lab.test_report import make
from offbeat.cli import view
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
