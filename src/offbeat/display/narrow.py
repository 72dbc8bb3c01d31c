"""Tables that fit a terminal of limited width without breaking a word or a number."""

from offbeat.display.table import Table

_LEAST_LABEL = 20  # characters to which a label may be wrapped before a column is left out


def narrow(table: Table, width: int, *, labels: int = 1) -> tuple[Table, tuple[str, ...]]:
    """Return a table with line breaks in its cells, and the headings that did not fit.

    Headings have one word per line. If the lines are still too wide, labels are wrapped, and the
    last columns are left out.

    Args:
        table: The table. Its cells have no line breaks.
        width: Number of characters of a line, with one space between columns.
        labels: Number of columns, from the left, that have methods with their settings. All other
            columns have numbers.
    """
    columns = [list(cells) for cells in zip(table.headings, *table.rows, strict=True)]
    names = columns[:labels]
    numbers = [[heading.replace(" ", "\n"), *cells] for heading, *cells in columns[labels:]]
    sizes = [1 + max(len(line) for cell in one for line in cell.split("\n")) for one in numbers]
    longest = [max(map(len, column)) for column in names]
    least = sum(1 + min(_LEAST_LABEL, size) for size in longest) - 1
    shown = len(numbers)
    while shown > 1 and least + sum(sizes[:shown]) > width:
        shown -= 1
    room = width - sum(sizes[:shown])
    for i, column in enumerate(names):
        own = min(longest[i], max(1, (room + 1) // (labels - i) - 1))
        names[i] = [wrapped(cell, own) for cell in column]
        room -= own + 1
    headings, *rows = zip(*names, *numbers[:shown], strict=True)
    return Table(headings, tuple(rows), table.caption), table.headings[labels + shown :]


def wrapped(label: str, width: int) -> str:
    """Break a label into lines of at most ``width`` characters, preferably after punctuation."""
    lines, rest = [], label
    while len(rest) > width:
        cut = max(rest.rfind(mark, 0, width) for mark in ",: ") + 1
        cut = cut if cut > 0 else width
        lines.append(rest[:cut].rstrip())
        rest = rest[cut:]
    return "\n".join([*lines, rest])
