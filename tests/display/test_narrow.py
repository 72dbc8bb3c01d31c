"""Tables that fit a terminal. Words and numbers are whole, and columns left out are named."""

import re

import pytest

from offbeat.display.narrow import narrow
from offbeat.display.table import Table

LABELS = (
    "bsp",
    "selsync:target_lssr=0.9,window=5,max_interval=32",
    "local:period=8 --sampler defdp --wire int8",
)
HEADINGS = ("strategy", "time to target", "speed-up", "final", "idle")
ROWS = tuple(
    (label, "2 of 3 runs, 12.5 s at best", "1.00x", "0.9900 (1 of 3 diverged)", "20 %")
    for label in LABELS
)
TABLE = Table(HEADINGS, ROWS, "what it is")


def lines_of(table: Table) -> list[str]:
    """Return the lines that a terminal shows, with one space between columns."""
    lines = []
    columns = [*zip(table.headings, *table.rows, strict=True)]
    widths = [max(len(line) for cell in column for line in cell.split("\n")) for column in columns]
    for row in (table.headings, *table.rows):
        cells = [cell.split("\n") for cell in row]
        for i in range(max(map(len, cells))):
            parts = [cell[i] if i < len(cell) else "" for cell in cells]
            lines.append(" ".join(p.ljust(w) for p, w in zip(parts, widths, strict=True)))
    return lines


@pytest.mark.parametrize("width", [200, 120, 80, 60, 50])
def test_words_and_numbers_are_whole(width: int) -> None:
    """What is shown are the first columns, in full."""
    shown, left_out = narrow(TABLE, width)
    assert max(map(len, lines_of(shown))) <= width
    count = len(shown.headings)
    assert left_out == HEADINGS[count:]
    assert shown.caption == TABLE.caption
    for row, got in zip((HEADINGS, *ROWS), (shown.headings, *shown.rows), strict=True):
        for cell, text in zip(row[:count], got, strict=True):
            assert text.replace("\n", "").replace(" ", "") == cell.replace(" ", "")
            for line in text.split("\n")[:-1]:
                assert line[-1] in ",:-" or re.search(rf"{re.escape(line)} ", cell), text
            assert "12.5 s" in text or "12.5" not in cell
            assert "20 %" in text or "20" not in cell
    assert bool(left_out) == (width < 90)
    if width == 200:
        assert shown.rows == ROWS
        assert shown.headings == ("strategy", "time\nto\ntarget", "speed-up", "final", "idle")


def test_a_word_without_room_is_broken_and_nothing_is_lost() -> None:
    """The first column of numbers is always shown."""
    table = Table(("strategy", "n", "m"), (("a" * 30, "1", "2"),))
    shown, left_out = narrow(table, 20)
    assert shown.rows == (("a" * 18 + "\n" + "a" * 12, "1"),)
    assert left_out == ("m",)


def test_a_table_without_rows() -> None:
    shown, left_out = narrow(Table(("strategy", "n"), ()), 80)
    assert (shown.headings, shown.rows, left_out) == (("strategy", "n"), (), ())
