"""The progress of training runs: a bar for all runs, one for the current run, and lines of text."""

import time
from typing import Any, Self

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column

from offbeat.extend import console, show_bandwidth
from offbeat_lab.events import Evaluation, Event, Start, Step, Waiting
from offbeat_lab.job import Job
from offbeat_lab.methods.registry import is_reference
from offbeat_lab.recipes import find_recipe
from offbeat_lab.results import Result

_LINE_SECONDS = 10.0  # between two lines about a run, if the output is not a terminal
_BESIDE = 64  # columns for bar, steps, times and metric
_PERIOD_SECONDS = 600.0  # of the speed that determines the time left


class Bar:
    """A context manager that shows the progress of several runs, one after the other.

    A terminal shows a bar for the current run and, if there are several, one for all runs, with the
    time so far and an estimate of the time left. It also shows a text about the run. If the output
    is not a terminal, the text is printed every 10 s, and a line for each evaluation. The text has
    rank 0's share of time spent waiting and its rate of sending since the text before, except for
    references, which do not measure them.

    Args:
        runs: Number of runs, including those that will be skipped.
        at_most: True if ``runs`` is an upper bound.
    """

    def __init__(self, runs: int = 1, *, at_most: bool = False) -> None:
        self._runs, self._most = runs, f"at most {runs}" if at_most else str(runs)
        self._started = self._skipped = self._unreported = 0
        name = Column(no_wrap=True, overflow="ellipsis", max_width=max(12, console.width - _BESIDE))
        self._progress = Progress(
            TextColumn("{task.description}", table_column=name),
            BarColumn(bar_width=12),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[text]}", table_column=Column(no_wrap=True)),
            console=console,
            transient=True,
            disable=not console.is_terminal,
            speed_estimate_period=_PERIOD_SECONDS,
        )
        self._all = self._progress.add_task("", total=runs, text="", visible=runs > 1)
        self._name = self._metric = self._last = self._loss = ""
        self._task: Any = None
        self._steps = 1  # of the current run
        self._measures = True  # False if the current run does not measure waiting and sending
        self._reported: tuple[float, Step] | None = None  # time and step of the newest text

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
        self._metric = find_recipe(job.recipe).metric
        self._name = f"{job.label} seed {job.seed}" if job.seed else job.label
        self._last = self._loss = ""
        self._reported = None
        self._started += 1
        number = f"run {self._skipped + self._started} of {self._most}"
        left, done = self._runs - self._skipped, self._started - 1
        self._progress.update(self._all, description=number, total=left, completed=done)
        self._task = self._progress.add_task(self._name, total=None, text="starting the workers")
        if self._runs > 1 and not console.is_terminal:
            self._print(number)

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

    def event(self, event: Event) -> None:
        """Show the progress that an event of the run reports."""
        match event:
            case Start():
                self._steps = event.steps
                self._progress.update(self._task, total=event.steps, text="")
            case Step():
                done = self._started - 1 + event.step / self._steps
                self._progress.update(self._all, completed=done)
                self._progress.update(self._task, completed=event.step)
                self._report(event)
            case Waiting():
                self._progress.update(self._task, text=f"{event.what} …")
            case Evaluation():
                diverged = " (diverged)" if event.diverged else ""
                value = f"{self._metric} {event.metric:.4f}{diverged}"
                self._progress.update(self._task, text=value)
                self._last = f"step {event.step}, {event.seconds:.1f} s of training: {value}"
                if not console.is_terminal:
                    self._print(self._last)

    def _report(self, step: Step) -> None:
        """Show a text such as "loss 0.43, waiting 2%, …", if it is due."""
        now = time.monotonic()
        if step.loss is not None:
            self._loss = f"loss {step.loss:.4g}"
        then, before = self._reported = self._reported or (now, step)
        if now < then + (1.0 if console.is_terminal else _LINE_SECONDS):
            return
        self._reported = now, step
        parts, seconds = [self._loss], step.seconds - before.seconds
        if seconds > 0 and self._measures:
            rate = (step.payload_bytes - before.payload_bytes) / seconds
            waited = (step.wait_seconds - before.wait_seconds) / seconds
            parts += [f"waiting {waited:.0%}", f"sending {show_rate(rate)}"]
        text = ", ".join(filter(None, parts))
        self._progress.update(self._task, text=text)
        if not console.is_terminal:
            self._print(f"step {step.step} of {self._steps}{', ' * bool(text)}{text}")

    def _print(self, text: str) -> None:
        console.print(f"{self._name}  {text}", soft_wrap=True)


def show_rate(bytes_per_second: float) -> str:
    """Return a rate as text, such as ``"49.4 Mbit/s"``."""
    return show_bandwidth(float(f"{8 * bytes_per_second:.3g}"))
