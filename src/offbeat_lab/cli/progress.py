"""The progress of training runs: a clock, a bar for the current run, and lines of text."""

import math
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, Self

from rich.console import RenderableType
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column
from rich.text import Text
from typing_extensions import override

from offbeat.extend import console, show_bandwidth
from offbeat_lab.events import (
    Evaluation,
    Event,
    Start,
    Step,
    Waiting,
)
from offbeat_lab.job import Job
from offbeat_lab.methods.registry import is_baseline
from offbeat_lab.recipes import find_recipe
from offbeat_lab.results import Result

_LINE_SECONDS = 10.0  # between two lines about a run, if the output is not a terminal
_LEAST_SECONDS = 5.0  # time from the first step to the first estimate of the time left

_BESIDE_NAME = 58  # columns for bar, steps and metric


class Bar:
    """A context manager that shows the progress of several runs, one after the other.

    A terminal shows a clock, a bar for the current run, and a line about the run. The clock has the
    number of the run, the time since the beginning, and an estimate of the time left. Both times
    include evaluations. The estimate assumes that all runs take equally long, and that training
    continues at the mean speed since the first step. The line has rank 0's share of time spent
    waiting and its rate of sending since the line before, except for baselines, which do not
    measure them.

    If the output is not a terminal, a line with the clock is printed for each of several runs, the
    line about the run every 10 s, with the time left, and a line for each evaluation. The seconds
    of an evaluation are training seconds, as in the tables.

    Args:
        runs: Number of runs, including those that will be skipped.
        at_most: True if ``runs`` is an upper bound.
    """

    def __init__(self, runs: int = 1, *, at_most: bool = False) -> None:
        self._runs, self._at_most = runs, at_most
        self._started = self._skipped = self._unreported = 0
        self._progress = _ClockAndBar()
        self._progress.clock = self.clock
        self._name = self._metric = self._value = self._last = self._loss = ""
        self._task: Any = None
        self._measures = True  # False if the current run does not measure waiting and sending
        self._limit = math.inf  # of the current run, in seconds of training
        self._share = 0.0  # share of the current run that is done
        self._first: tuple[float, float] | None = None  # time and runs done, at the first step
        self._reported: tuple[float, Step] | None = None  # time and step of the newest line
        self._began = time.monotonic()

    def __enter__(self) -> Self:
        self._began = time.monotonic()
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._report_skipped()
        self._progress.line = ""
        self._progress.stop()

    def start(self, job: Job) -> None:
        """Start the bar of the next run."""
        self._report_skipped()
        if self._task is not None:
            self._progress.remove_task(self._task)
            if console.is_terminal and self._last:
                self._print(self._last)
        self._progress.line = ""
        self._measures = not is_baseline(job.strategy)
        self._limit = job.max_seconds or math.inf
        self._metric = find_recipe(job.recipe).metric
        self._name = f"{job.label} seed {job.seed}" if job.seed else job.label
        self._value = self._last = self._loss = ""
        self._share, self._reported = 0.0, None
        self._started += 1
        self._task = self._progress.add_task(
            self._name, total=None, steps="", metric="starting the workers"
        )
        if self._runs > 1 and not console.is_terminal:
            self._print(self.clock())

    def skip(self, result: Result) -> None:
        """Count a run that is skipped, because its result exists already."""
        self._skipped += 1
        self._unreported += 1

    def _report_skipped(self) -> None:
        """Print one line about the runs skipped since the last line."""
        count, self._unreported = self._unreported, 0
        if count:
            console.print(f"runs in the results already: {count} of {self._most()}")

    def _most(self) -> str:
        return f"at most {self._runs}" if self._at_most else str(self._runs)

    def clock(self) -> str:
        """Return the number of the run, the time so far and the time left, if it can be estimated.

        Example: "run 3 of 8, 0:01:05 so far, about 3 min left".
        """
        elapsed = time.monotonic() - self._began
        parts = [f"{timedelta(seconds=round(elapsed))} so far"]
        if self._runs > 1:
            parts.insert(0, f"run {max(1, self._skipped + self._started)} of {self._most()}")
        return ", ".join(parts + self._time_left())

    def _time_left(self) -> list[str]:
        """Return text about the time left, if known."""
        if self._first is None:
            return []
        began, before = self._first
        seconds = time.monotonic() - began
        done = self._done()
        left = self._runs - self._skipped - done
        if seconds < _LEAST_SECONDS or done <= before or left <= 0:
            return []
        text = show_time_left(seconds * left / (done - before))
        return [f"at most {text}" if self._at_most else text]

    def _done(self) -> float:
        """Return the number of runs done, without those skipped; a fraction for the current one."""
        return self._started - 1 + self._share

    def event(self, event: Event) -> None:
        """Show the progress that an event of the run reports."""
        match event:
            case Start():
                self._progress.update(self._task, total=event.steps)
                self._update(0)
            case Step():
                self._update(event.step, event.seconds)
                self._show_line(event)
            case Waiting():
                self._progress.update(self._task, metric=f"{event.what} …")
            case Evaluation():
                diverged = " (diverged)" if event.diverged else ""
                self._value = f"{self._metric} {event.metric:.4f}{diverged}"
                self._last = f"step {event.step}, {event.seconds:.1f} s of training: {self._value}"
                self._update(event.step, event.seconds)
                if not console.is_terminal:
                    self._print(self._last)

    def _show_line(self, step: Step) -> None:
        """Show a line such as "step 120 of 2700, loss 0.43, …", if it is due."""
        now = time.monotonic()
        if self._first is None:
            self._first = now, self._done()
        if step.loss is not None:
            self._loss = f"loss {step.loss:.4g}"
        if self._reported is None:
            self._reported = now, step
            return
        then, before = self._reported
        if now < then + (1.0 if console.is_terminal else _LINE_SECONDS):
            return
        self._reported = now, step
        parts = [f"step {step.step} of {round(self._progress.tasks[-1].total or 0)}", self._loss]
        seconds = step.seconds - before.seconds
        if seconds > 0 and self._measures:
            waited = step.wait_seconds - before.wait_seconds
            sent = step.payload_bytes - before.payload_bytes
            parts += [f"waiting {waited / seconds:.0%}", f"sending {show_rate(sent / seconds)}"]
        if console.is_terminal:
            self._progress.line = ", ".join(filter(None, parts))
        else:
            for_all = " for all runs" * (self._runs > 1)
            parts += [text + for_all for text in self._time_left()]
            self._print(", ".join(filter(None, parts)))

    def _update(self, step: int, seconds: float = 0.0) -> None:
        """Show a number of steps, after a time of training."""
        # Evaluations follow the training, with smaller numbers of steps.
        task = self._progress.tasks[-1]
        done = max(step, round(task.completed))
        steps = f"{done}/{round(task.total)} steps" if task.total else ""
        self._progress.update(self._task, completed=done, steps=steps, metric=self._value)
        of_steps, of_time = done / (task.total or math.inf), seconds / self._limit
        self._share = min(1.0, max(self._share, of_steps, of_time))

    def _print(self, text: str) -> None:
        console.print(f"{self._name}  {text}", soft_wrap=True)


class _ClockAndBar(Progress):
    """A line with a clock above the bar, and a line of text below. Shown only on a terminal.

    Attributes:
        clock: Function that returns the line above.
        line: The line below.
    """

    clock: Callable[[], str] | None = None
    line = ""

    def __init__(self) -> None:
        width = max(12, console.width - _BESIDE_NAME)
        name = Column(no_wrap=True, overflow="ellipsis", max_width=width)
        super().__init__(
            TextColumn("{task.description}", table_column=name),
            BarColumn(bar_width=12),
            TextColumn("{task.fields[steps]}"),
            TextColumn("{task.fields[metric]}"),
            console=console,
            disable=not console.is_terminal,
        )

    @override
    def get_renderables(self) -> Iterable[RenderableType]:
        if self.clock is not None:  # the base class calls this before it is set
            yield Text(self.clock())
        yield from super().get_renderables()
        if self.line:
            yield Text(self.line, style="dim", no_wrap=True, overflow="ellipsis")


def show_time_left(seconds: float) -> str:
    """Return ``"about 4 min left"`` for 250."""
    return f"about {show_duration(seconds)} left"


def show_rate(bytes_per_second: float) -> str:
    """Return a rate as text, such as ``"49.4 Mbit/s"``."""
    return show_bandwidth(float(f"{8 * bytes_per_second:.3g}"))


def show_duration(seconds: float) -> str:
    """Return ``"4 min"`` for 250, rounded to seconds, minutes or tenths of an hour."""
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    if seconds < 59.5 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
