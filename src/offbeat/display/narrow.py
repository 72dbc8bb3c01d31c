"""Tables that fit a terminal of limited width without breaking a word or a number."""

import re
from collections.abc import Sequence

from offbeat.display.table import Table

_BREAK = re.compile(r" (?!(?:[mun]?s|min|h|[kMGT]?B)\b|%)")  # not between a number and its unit
_BRACKET = re.compile(r" (?=[(\[])")
_OPTION_OR_SETTING = re.compile(r"--\S+ \S+ ?|[^,: ]*[,: ]|[^,: ]+")
_WORD = re.compile(r"[^,: ]*[,: ]|[^,: ]+")


def narrow(table: Table, width: int, *, labels: int = 1) -> tuple[Table, tuple[str, ...]]:
    """Return a table with line breaks in its cells, and the headings that did not fit.

    Headings have one word per line. If the lines are still too wide, cells with numbers are wrapped
    at spaces, and then labels after commas, colons and spaces. If this is not enough, the last
    columns are left out.

    Args:
        table: The table. Its cells have no line breaks.
        width: Number of characters of a line, with one space between columns.
        labels: Number of columns, from the left, that have methods with their settings. All other
            columns have numbers.
    """
    columns = [list(cells) for cells in zip(table.headings, *table.rows, strict=True)]
    names = columns[:labels]
    numbers = [[heading.replace(" ", "\n"), *cells] for heading, *cells in columns[labels:]]
    longest = [max(map(len, column)) for column in names]
    least = [max(len(word) for cell in column for word in _words(cell)) for column in names]
    if width - _width(numbers) < _with_gaps(longest):
        numbers = [_wrapped(column) for column in numbers]
    shown = len(numbers)
    while shown > 1 and width - _width(numbers[:shown]) < _with_gaps(least):
        shown -= 1
    room = width - _width(numbers[:shown])
    for i, column in enumerate(names):
        share = max(least[i], (room + 1) // (labels - i) - 1)
        own = max(1, min(longest[i], share, room - _with_gaps([0, *least[i + 1 :]])))
        names[i] = ["\n".join(_lines(cell, own)) for cell in column]
        room -= own + 1
    headings, *rows = zip(*names, *numbers[:shown], strict=True)
    return Table(headings, tuple(rows), table.caption), table.headings[labels + shown :]


def _width(columns: Sequence[Sequence[str]]) -> int:
    """Return the width of columns with a space before each."""
    return sum(
        1 + max(len(line) for cell in column for line in cell.split("\n")) for column in columns
    )


def _with_gaps(widths: Sequence[int]) -> int:
    """Return the width of columns with a space between them."""
    return sum(widths) + len(widths) - 1


def _words(label: str) -> list[str]:
    return [word.rstrip() for word in _WORD.findall(label)] or [""]


def _wrapped(column: Sequence[str]) -> list[str]:
    """Return the cells of a column, wrapped at spaces to the width of the longest word.

    An opening bracket begins a line.
    """
    heading, *cells = column
    heading = heading.replace("-", "-\n")
    parts = [[_BREAK.split(part) for part in _BRACKET.split(cell)] for cell in cells]
    words = [*heading.split("\n"), *(word for cell in parts for part in cell for word in part)]
    width = max(map(len, words))

    def fill(part: Sequence[str]) -> str:
        return "\n".join(_fill([f"{word} " for word in part], width))

    return [heading, *("\n".join(map(fill, cell)) for cell in parts)]


def _lines(label: str, width: int) -> list[str]:
    """Return a label in lines. An option and its value are separated only if they do not fit."""
    pieces = _OPTION_OR_SETTING.findall(label)
    words = [[piece] if len(piece.rstrip()) <= width else _WORD.findall(piece) for piece in pieces]
    return _fill([word for piece in words for word in piece], width)


def _fill(words: Sequence[str], width: int) -> list[str]:
    """Return lines of at most ``width`` characters. Only a word that is longer is broken."""
    lines = [""]
    for word in words:
        while len(word.rstrip()) > width:
            lines.append(word[:width])
            word = word[width:]
        if len(lines[-1]) + len(word.rstrip()) <= width:
            lines[-1] += word
        else:
            lines.append(word)
    return [line.rstrip() for line in lines if line]
