"""What the command line shows: a progress bar and tables."""

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from offbeat.lab import report
from offbeat.lab.compare import Result
from offbeat.lab.recipes import find_recipe
from offbeat.lab.train import Event, Job

console = Console()


class Bar:
    """A progress bar for one run after the other."""

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("{task.description}", table_column=None),
            BarColumn(),
            TextColumn("{task.completed}/{task.total} steps"),
            TextColumn("{task.fields[metric]}"),
            TimeElapsedColumn(),
            console=console,
        )
        self._metric = self._name = ""
        self._task: Any = None

    def __enter__(self) -> "Bar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def start(self, job: Job) -> None:
        """A run begins."""
        self._metric = find_recipe(job.recipe).metric
        self._name = f"{job.strategy} seed {job.seed}" if job.seed else job.strategy
        self._task = self._progress.add_task(self._name, total=None, metric="starting")

    def event(self, event: Event) -> None:
        """An event of the run; a line for each evaluation where no bar can be drawn."""
        if event["event"] == "start":
            self._progress.update(self._task, total=event["steps"])
        elif event["event"] in ("step", "evaluation"):
            self._progress.update(self._task, completed=event["step"])
        if event["event"] == "evaluation":
            metric = f"{self._metric} {event['metric']:.4f}"
            self._progress.update(self._task, metric=metric)
            if not console.is_terminal:
                console.print(f"{self._name}  {line(event, metric)}", soft_wrap=True)


def line(event: Event, metric: str) -> str:
    """An evaluation in one line."""
    return f"step {event['step']}  {event['seconds']:.1f} s  {metric}"


def show(results: list[Result]) -> None:
    """The results as a table."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    rows = list(report.rows(results, ranges=False))  # there is no room for them
    for heading, *cells in zip(report.HEADINGS, *rows, strict=True):
        if heading == "strategy":  # of all columns it alone may be broken, where it is long
            table.add_column(heading, overflow="fold")
        else:
            width = max(map(len, cells))
            table.add_column(heading.replace(" ", "\n"), justify="right", min_width=width)
    for row in rows:
        table.add_row(*row)
    console.print()
    console.print(report.caption(results), style="dim", highlight=False)
    console.print(table)
    console.print()
