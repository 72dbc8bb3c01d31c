"""The progress bar: steps, metric, current activity."""

import pytest

from offbeat.cli import view
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
