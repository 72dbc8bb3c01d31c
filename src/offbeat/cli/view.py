"""Output of the command line: a progress bar, tables, and paths of written files."""

import re
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import rich.table
import typer
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from offbeat.cli.progress import ProgressLine, show_time_left
from offbeat.display.table import Table
from offbeat.lab.evaluation import MAX_EVALUATIONS
from offbeat.lab.events import (
    Evaluation,
    EvaluationCount,
    Event,
    NotSaved,
    Resumed,
    Start,
    Step,
    Stopped,
    Waiting,
)
from offbeat.lab.job import Job
from offbeat.lab.recipes import find_recipe
from offbeat.lab.results import Result
from offbeat.lab.step_time import StepTime
from offbeat.units import show_seconds

console = Console()
_WIDE = 100  # columns
_LINE_SECONDS = 10.0  # between two lines about the progress, if the output is not a terminal
_MOST_SPREAD = 3.0  # ratio of the longest steps to the shortest, above which a warning is printed


class _Bars(Progress):
    """Progress bars with a line of text below them."""

    line = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        if self.line:
            yield Text(self.line, style="dim", no_wrap=True, overflow="ellipsis")


class Bar:
    """A context manager that shows a progress bar for each of several runs, one after the other.

    All seconds are training seconds, as in the tables: they do not count evaluations. The line of
    a ``ProgressLine`` is below the bars. If the output is not a terminal, a line is printed every
    10 s and for each evaluation instead.
    """

    def __init__(self, runs: int = 1) -> None:
        self._runs, self._run, self._skipped = runs, 0, 0
        self._began = time.monotonic()
        self._progress = _Bars(
            TextColumn("{task.description}", table_column=None),
            BarColumn(),
            TextColumn("{task.completed}/{task.total} steps"),
            TextColumn("{task.fields[metric]}"),
            TextColumn("{task.fields[seconds]}"),
            console=console,
        )
        self._metric = self._name = self._last = ""
        self._task: Any = None
        self._job: Job | None = None
        self._line: ProgressLine | None = None

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.line = ""
        self._progress.stop()

    def start(self, job: Job) -> None:
        """Start the bar of the next run."""
        self._metric = find_recipe(job.recipe).metric
        self._job, self._name, self._last = job, _name(job), ""
        self._progress.line = ""
        self._task = self._progress.add_task(
            self._numbered(self._name), total=None, metric="starting the workers", seconds=""
        )

    def skip(self, result: Result) -> None:
        """Report that the next run is skipped: its result exists already."""
        self._skipped += 1
        name = self._numbered(_name(result.job))
        console.print(f"{name}  is in the results already", soft_wrap=True)

    def _numbered(self, name: str) -> str:
        self._run += 1
        number = f"{self._run}/{self._runs} " if self._runs > 1 and console.is_terminal else ""
        return f"{number}{name}"

    def runs_done(self) -> str:
        """Return text such as "3 of 8 runs done at 14:32, about 4 min left", between two runs.

        The text is empty after the last run.
        """
        if self._run == self._runs:
            return ""
        clock = time.strftime("%H:%M")
        if not self._runs:
            return f"{self._run} runs done at {clock}"
        mean = (time.monotonic() - self._began) / (self._run - self._skipped)
        left = show_time_left(mean * (self._runs - self._run))
        return f"{self._run} of {self._runs} runs done at {clock}, {left}"

    def event(self, event: Event) -> None:
        """Show the progress that an event of the run reports."""
        match event:
            case Start():
                self._progress.update(self._task, total=event.steps, metric="")
                assert self._job is not None
                period = 1.0 if console.is_terminal else _LINE_SECONDS
                self._line = ProgressLine(self._job, event.steps, period)
            case Step():
                self._update(event.step, event.seconds)
                self._show_line(event)
            case Waiting():
                self._progress.update(self._task, metric=f"{event.what} …")
            case Evaluation():
                self._last = f"{self._metric} {event.metric:.4f}"
                self._update(event.step, event.seconds)
                if not console.is_terminal:
                    self._print(f"step {event.step}  {event.seconds:.1f} s  {self._last}")
            case EvaluationCount() if event.evaluations < MAX_EVALUATIONS:
                times = "once" if event.evaluations == 1 else f"{event.evaluations} times"
                self._print(
                    f"evaluating takes {show_seconds(event.seconds)}: {times} in this run, so that "
                    "all evaluations take at most a tenth of the time, or 3 s (--evaluations sets "
                    "the number)"
                )
            case Resumed():
                self._progress.update(self._task, completed=event.step)
                self._print(f"continues from step {event.step}")
            case Stopped():
                self._print(
                    f"saved at step {event.step} in {event.directory}: --resume continues from it"
                )
            case NotSaved():
                self._print(f"no checkpoint was saved at the end: {event.why}")

    def _show_line(self, step: Step) -> None:
        line = None if self._line is None else self._line.update(step)
        if line is None:
            return
        if console.is_terminal:
            self._progress.line = line
        else:
            self._print(line)

    def _update(self, step: int, seconds: float) -> None:
        self._progress.update(
            self._task, completed=step, metric=self._last, seconds=f"{seconds:.1f} s of training"
        )

    def _print(self, text: str) -> None:
        console.print(f"{self._name}  {text}", soft_wrap=True)


def _name(job: Job) -> str:
    return f"{job.label} seed {job.seed}" if job.seed else job.label


def print_path(what: str, path: Path) -> None:
    """Print the path of a written file."""
    console.print(f"{what} {path}", highlight=False, soft_wrap=True)


def print_step_time(recipe: str, step: StepTime, *, only_warn: bool = False) -> None:
    """Print a measured step time. Warn on standard error if its steps differed much."""
    if not only_warn:
        time = show_seconds(step.seconds)
        console.print(
            f"a step of {recipe} takes {time} here, as measured now; --step-time sets another time",
            highlight=False,
            soft_wrap=True,
        )
    if step.high > _MOST_SPREAD * step.low:
        typer.echo(
            f"warning: measured steps took {show_seconds(step.low)} to {show_seconds(step.high)} "
            "(10 % and 90 % quantiles), perhaps because other programs were running: set "
            "--step-time, or measure again on an idle machine",
            err=True,
        )


def print_table(table: Table, *, texts: int = 1) -> None:
    """Print a table with its caption. The first ``texts`` columns are text, the others numbers."""
    console.print(rendered(table, texts=texts))
    console.print()


def rendered(table: Table, *, texts: int = 1) -> RenderableType:
    """Return what ``print_table`` prints, without the empty line after it."""
    gap = 2 if console.width >= _WIDE else 1
    grid = rich.table.Table(box=None, pad_edge=False, padding=(0, gap, 0, 0))
    for number, (heading, *cells) in enumerate(zip(table.headings, *table.rows, strict=True)):
        # Lines of neighbouring cells belong together, as a setting and its range. Wrapping one cell
        # would shift them.
        unwrapped = number == 0 or any("\n" in cell for cell in cells)
        grid.add_column(
            heading,
            justify="left" if number < texts else "right",
            no_wrap=unwrapped,
            overflow="fold",
        )
    return _captioned(table, grid)


def print_narrow_table(table: Table) -> None:
    """Print a table of many columns, and its caption. Headings have one word per line.

    On a narrow screen, other cells are wrapped before names. Names are wrapped at commas, colons
    and spaces, and inside settings only if they do not fit otherwise.
    """
    heading, *headings = (text.replace(" ", "\n") for text in table.headings)
    names, *columns = (list(cells) for cells in zip(*table.rows, strict=True))
    width = console.width - _width(headings, columns)
    if width < max(map(len, names)):
        headings = [text.replace("-", "-\n") for text in headings]
        columns = [[_BREAK.sub("\n", cell) for cell in column] for column in columns]
        width = max(len(heading), console.width - _width(headings, columns))
    grid = rich.table.Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    grid.add_column(heading, no_wrap=True)
    for text in headings:
        grid.add_column(text, justify="right", no_wrap=True)
    wrapped = ["\n".join(_lines(name, width)) for name in names]
    rows = (*zip(wrapped, *columns, strict=True),)
    console.print(_captioned(Table((heading, *headings), rows, table.caption), grid))
    console.print()


_BREAK = re.compile(r" (?!(?:s|[kMGT]?B)\b|%)")  # not between a number and its unit


def _width(headings: Sequence[str], columns: Sequence[Sequence[str]]) -> int:
    """Return the width of columns with a space before each."""
    return sum(
        1 + max(len(line) for text in (heading, *column) for line in text.split("\n"))
        for heading, column in zip(headings, columns, strict=True)
    )


def _lines(name: str, width: int) -> list[str]:
    """Return the name of a method in lines of at most ``width`` characters."""
    lines = [""]
    for piece in re.findall(r"--\S+ \S+ ?|[^,: ]*[,: ]|[^,: ]+", name):
        for part in re.findall(r"[^= ]*[= ]|[^= ]+", piece) if len(piece) > width else [piece]:
            while len(part.rstrip()) > width:  # nothing else is left
                lines.append(part[:width])
                part = part[width:]
            if len(lines[-1]) + len(part.rstrip()) <= width:
                lines[-1] += part
            else:
                lines.append(part)
    return [line.rstrip() for line in lines if line]


def _captioned(table: Table, grid: rich.table.Table) -> RenderableType:
    """Add the rows of ``table`` to ``grid``, and return it below the caption."""
    for row in table.rows:
        grid.add_row(*map(Text, row))
    return Group(Text(table.caption, style="dim"), grid) if table.caption else grid
