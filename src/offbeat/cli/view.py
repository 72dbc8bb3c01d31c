"""Output of the command line: tables, and paths of written files."""

from pathlib import Path
from typing import TYPE_CHECKING

import rich.table
import typer
from rich.console import Console, Group, RenderableType
from rich.text import Text

from offbeat.display.narrow import narrow
from offbeat.display.table import Table
from offbeat.units import show_seconds

if TYPE_CHECKING:
    from offbeat_lab.timing.step_time import StepTime

console = Console(markup=False, emoji=False)  # paths may have brackets and colons
WIDER = "a wider terminal shows them"
_WIDE = 100  # columns
_MOST_SPREAD = 3.0  # ratio of the longest steps to the shortest, above which a warning is printed


def print_path(what: str, path: Path) -> None:
    """Print the path of a written file."""
    console.print(f"{what} {path}", highlight=False, soft_wrap=True)


def print_step_time(recipe: str, step: "StepTime", *, only_warn: bool = False) -> None:
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


def print_narrow_table(table: Table, *, labels: int = 1, rest: str = WIDER) -> None:
    """Print a table of many columns, and its caption, on a terminal of any width.

    The first ``labels`` columns have methods with their settings. If columns do not fit, a line
    below the table names them and says with the text ``rest`` where they are.
    """
    shown, left_out = narrow(table, console.width, labels=labels)
    grid = rich.table.Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for number, heading in enumerate(shown.headings):
        grid.add_column(heading, justify="left" if number < labels else "right", no_wrap=True)
    console.print(_captioned(shown, grid))
    console.print()
    if left_out:
        text = f"Not shown in {console.width} columns: {', '.join(left_out)}; {rest}.\n"
        console.print(text, style="dim", highlight=False)


def _captioned(table: Table, grid: rich.table.Table) -> RenderableType:
    """Add the rows of ``table`` to ``grid``, and return it below the caption."""
    for row in table.rows:
        grid.add_row(*map(Text, row))
    return Group(Text(table.caption, style="dim"), grid) if table.caption else grid
