"""The line about the progress of a run."""

import io
import time

import pytest
from rich.console import Console

from offbeat.cli import progress
from offbeat.cli.progress import ProgressLine, show_duration
from offbeat.lab.events import Start, Step
from offbeat.lab.job import Job


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
        monkeypatch.setattr(progress, "console", console)
        with progress.Bar() as bar:
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
