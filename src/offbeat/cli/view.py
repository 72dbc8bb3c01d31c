"""Output of the command line: tables on a terminal."""

from typing import Literal

import rich.table
from rich.console import Console
from rich.text import Text

from offbeat.display.narrow import narrow
from offbeat.display.table import Table

console = Console(markup=False, emoji=False)  # paths may have brackets and colons
WIDER = "a wider terminal shows them"  # default text about columns that do not fit


def print_table(table: Table, *, texts: int = 1) -> None:
    """Print a table with its caption. The first ``texts`` columns are text, the others numbers."""
    grid = rich.table.Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for number, (heading, *cells) in enumerate(zip(table.headings, *table.rows, strict=True)):
        # Neighbouring cells correspond line by line, such as a setting and its range. Wrapping one
        # cell would shift its lines.
        unwrapped = number == 0 or number >= texts or any("\n" in cell for cell in cells)
        justify: Literal["left", "right"] = "left" if number < texts else "right"
        grid.add_column(heading, justify=justify, no_wrap=unwrapped, overflow="fold")
    for row in table.rows:
        grid.add_row(*map(Text, row))
    if table.caption:
        console.print(Text(table.caption, style="dim"))
    console.print(grid)
    console.print()


def print_narrow_table(table: Table, *, labels: int = 1, rest: str = WIDER) -> None:
    """Print a table of many columns, and its caption, on a terminal of any width.

    The first ``labels`` columns contain methods with their settings. If columns do not fit, a line
    below the table lists their names, and ``rest`` says where to find them.
    """
    shown, left_out = narrow(table, console.width, labels=labels)
    print_table(shown, texts=labels)
    if left_out:
        text = f"Not shown in {console.width} columns: {', '.join(left_out)}; {rest}.\n"
        console.print(text, style="dim", highlight=False)
