"""What the command line shows: a progress bar and tables."""

from types import TracebackType
from typing import Any

import rich.table
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from offbeat.display.table import Table
from offbeat.lab.evaluation import MAX_EVALUATIONS
from offbeat.lab.events import (
    Chosen,
    Evaluation,
    Event,
    Left,
    Resumed,
    Start,
    Step,
    Unsaved,
    Waiting,
)
from offbeat.lab.job import Job
from offbeat.lab.recipes import find_recipe
from offbeat.lab.results import Result
from offbeat.units import show_seconds

console = Console()
_WIDE = 100  # columns of a screen


class Bar:
    """A progress bar for one run after the other.

    Args:
        runs: How many there will be; with more than one they are counted.
    """

    def __init__(self, runs: int = 1) -> None:
        self._runs, self._run = runs, 0
        self._progress = Progress(
            TextColumn("{task.description}", table_column=None),
            BarColumn(),
            TextColumn("{task.completed}/{task.total} steps"),
            TextColumn("{task.fields[metric]}"),
            TimeElapsedColumn(),
            console=console,
        )
        self._metric = self._name = self._shown = ""
        self._task: Any = None

    def __enter__(self) -> "Bar":
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def start(self, job: Job) -> None:
        """A run begins."""
        self._metric = find_recipe(job.recipe).metric
        self._name, shown = _name(job), self._count(_name(job))
        self._shown = ""
        self._task = self._progress.add_task(shown, total=None, metric="starting the workers")

    def keep(self, result: Result) -> None:
        """A run need not be run: its result is there."""
        name = self._count(_name(result.job))
        console.print(f"{name}  is in the results already", soft_wrap=True)

    def _count(self, name: str) -> str:
        self._run += 1
        shown = f"{self._run}/{self._runs} " if self._runs > 1 and console.is_terminal else ""
        return f"{shown}{name}"

    def event(self, event: Event) -> None:
        """An event of the run; a line for each evaluation where no bar can be drawn."""
        match event:
            case Start():
                self._progress.update(self._task, total=event.steps, metric="")
            case Step():
                self._progress.update(self._task, completed=event.step, metric=self._shown)
            case Resumed():
                self._progress.update(self._task, completed=event.step)
                console.print(f"{self._name}  goes on from step {event.step}", soft_wrap=True)
            case Left():
                where = f"saved at step {event.step} in {event.directory}"
                console.print(f"{self._name}  {where}: --resume goes on from it", soft_wrap=True)
            case Unsaved():
                where = f"no checkpoint was saved at the end: {event.why}"
                console.print(f"{self._name}  {where}", soft_wrap=True)
            case Waiting():
                self._progress.update(self._task, metric=f"{event.what} …")
            case Chosen():
                if event.evaluations < MAX_EVALUATIONS:
                    console.print(f"{self._name}  {chosen(event)}", soft_wrap=True)
            case Evaluation():
                self._shown = f"{self._metric} {event.metric:.4f}"
                self._progress.update(self._task, completed=event.step, metric=self._shown)
                if not console.is_terminal:
                    console.print(f"{self._name}  {line(event, self._metric)}", soft_wrap=True)


def _name(job: Job) -> str:
    return f"{job.label} seed {job.seed}" if job.seed else job.label


def line(event: Evaluation, metric: str) -> str:
    """An evaluation in one line."""
    return f"step {event.step}  {event.seconds:.1f} s  {metric} {event.metric:.4f}"


def chosen(event: Chosen) -> str:
    """How often a run evaluates, and why, in one line."""
    times = "once" if event.evaluations == 1 else f"{event.evaluations} times"
    return (
        f"evaluating takes {show_seconds(event.seconds)}: {times} in this run, so that all cost at "
        "most a tenth of the time, or 3 s (--evaluations sets the number)"
    )


def show(table: Table, *, texts: int = 1) -> None:
    """Print caption and table; the first ``texts`` columns hold words, the others figures."""
    gap = 2 if console.width >= _WIDE else 1
    found = rich.table.Table(box=None, pad_edge=False, padding=(0, gap, 0, 0))
    for number, (heading, *cells) in enumerate(zip(table.headings, *table.rows, strict=True)):
        # Lines of neighbouring cells belong together, so they are not broken any further.
        whole = number == 0 or any("\n" in cell for cell in cells)
        found.add_column(
            heading,
            justify="left" if number < texts else "right",
            no_wrap=whole,
            overflow="fold",
        )
    _print(table, found)


def show_narrow(table: Table) -> None:
    """Print caption and table, which has many columns: their headings take several lines."""
    found = rich.table.Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    first, *others = zip(table.headings, *table.rows, strict=True)
    found.add_column(first[0], overflow="fold")  # it alone may be broken, where it is long
    for heading, *cells in others:
        width = max(map(len, cells))
        found.add_column(heading.replace(" ", "\n"), justify="right", min_width=width)
    _print(table, found)


def _print(table: Table, found: rich.table.Table) -> None:
    for row in table.rows:
        found.add_row(*row)
    if table.caption:
        console.print(table.caption, style="dim", highlight=False)
    console.print(found)
    console.print()
