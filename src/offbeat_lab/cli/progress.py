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
from offbeat_lab.events import Evaluation, Event, Start, Step, Waiting
from offbeat_lab.job import Job
from offbeat_lab.methods.registry import is_reference
from offbeat_lab.recipes import find_recipe
from offbeat_lab.results import Result

_LINE_SECONDS = 10.0  # between two lines about a run, if the output is not a terminal
_LEAST_SECONDS = 5.0  # time from the first step to the first estimate of the time left
_BESIDE = 58  # columns for bar, steps and metric


class Bar:
    """A context manager that shows the progress of several runs, one after the other.

    A terminal shows a bar for the current run, and below it a clock and a line about the run. If
    the output is not a terminal, line and clock are printed together every 10 s, and a line for
    each evaluation. The line has rank 0's share of time spent waiting and its rate of sending since
    the line before, except for references, which do not measure them. The clock has the number of
    the run, the time since the beginning, and an estimate of the time left. Both times include
    evaluations. The estimate assumes that all runs take equally long, and that training continues
    at the mean speed since the first step.

    Args:
        runs: Number of runs, including those that will be skipped.
        at_most: True if ``runs`` is an upper bound.
    """

    def __init__(self, runs: int = 1, *, at_most: bool = False) -> None:
        self._runs, self._most = runs, f"at most {runs}" if at_most else str(runs)
        self._started = self._skipped = self._unreported = 0
        self._progress = _BarAndLines(lambda: (self.clock(), self._line))
        self._name = self._metric = self._value = self._last = self._loss = self._line = ""
        self._task: Any = None
        self._measures = True  # False if the current run does not measure waiting and sending
        self._limit = math.inf  # of the current run, in seconds of training
        self._share = 0.0  # share of the current run that is done
        self._first: tuple[float, float] | None = None  # time and runs done, at the first step
        self._reported: tuple[float, Step] | None = None  # time and step of the newest line
        self._began = time.monotonic()

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._end_run()
        self._progress.stop()

    def start(self, job: Job) -> None:
        """Start the bar of the next run."""
        self._end_run()
        self._measures = not is_reference(job.strategy)
        self._limit = job.max_seconds or math.inf
        self._metric = find_recipe(job.recipe).metric
        self._name = f"{job.label} seed {job.seed}" if job.seed else job.label
        self._value = self._last = self._loss = self._line = ""
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

    def _end_run(self) -> None:
        """Replace the bar by a line with the last evaluation, and report the runs skipped."""
        if self._unreported:
            console.print(f"runs in the results already: {self._unreported} of {self._most}")
        self._unreported = 0
        if self._task is not None:
            self._progress.remove_task(self._task)
            if console.is_terminal and self._last:
                self._print(self._last)

    def clock(self) -> str:
        """Return the number of the run, the time so far and the time left, if it can be estimated.

        Example: "run 3 of 8, 0:01:05 so far, about 0:03:00 left".
        """
        now = time.monotonic()
        text = f"{timedelta(seconds=round(now - self._began))} so far"
        if self._runs > 1:
            text = f"run {self._skipped + self._started} of {self._most}, {text}"
        began, before = self._first or (now, 0.0)
        done = self._done() - before
        if now - began < _LEAST_SECONDS or done <= 0:
            return text
        left = (self._runs - self._skipped - self._done()) * (now - began) / done
        return f"{text}, about {timedelta(seconds=round(max(0.0, left)))} left"

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
                self._report(event)
            case Waiting():
                self._progress.update(self._task, metric=f"{event.what} …")
            case Evaluation():
                diverged = " (diverged)" if event.diverged else ""
                self._value = f"{self._metric} {event.metric:.4f}{diverged}"
                self._last = f"step {event.step}, {event.seconds:.1f} s of training: {self._value}"
                self._update(event.step, event.seconds)
                if not console.is_terminal:
                    self._print(self._last)

    def _report(self, step: Step) -> None:
        """Show a line such as "step 120 of 2700, loss 0.43, …", if it is due."""
        now = time.monotonic()
        self._first = self._first or (now, self._done())
        if step.loss is not None:
            self._loss = f"loss {step.loss:.4g}"
        then, before = self._reported = self._reported or (now, step)
        if now < then + (1.0 if console.is_terminal else _LINE_SECONDS):
            return
        self._reported = now, step
        parts = [f"step {step.step} of {round(self._progress.tasks[-1].total or 0)}", self._loss]
        seconds = step.seconds - before.seconds
        if seconds > 0 and self._measures:
            rate = (step.payload_bytes - before.payload_bytes) / seconds
            waited = (step.wait_seconds - before.wait_seconds) / seconds
            parts += [f"waiting {waited:.0%}", f"sending {show_rate(rate)}"]
        self._line = ", ".join(filter(None, parts))
        if not console.is_terminal:
            self._print(f"{self._line}, {self.clock()}")

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


class _BarAndLines(Progress):
    """A bar, and below it the lines that a function returns. Shown only on a terminal."""

    def __init__(self, lines: Callable[[], Iterable[str]]) -> None:
        self._lines = lines
        name = Column(no_wrap=True, overflow="ellipsis", max_width=max(12, console.width - _BESIDE))
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
        yield from super().get_renderables()
        for line in filter(None, self._lines() if self.tasks else ()):
            yield Text(line, style="dim", no_wrap=True, overflow="ellipsis")


def show_rate(bytes_per_second: float) -> str:
    """Return a rate as text, such as ``"49.4 Mbit/s"``."""
    return show_bandwidth(float(f"{8 * bytes_per_second:.3g}"))
