"""A table as a value: made once, shown as Markdown, on a page, in a notebook or on a terminal."""

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True)
class Table:
    """Text in rows and columns. The first column names what its row is about.

    Attributes:
        headings: One a column.
        rows: As many cells each as there are headings.
        caption: What the table is of, in one line; empty if that needs no words.
    """

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""

    def markdown(self) -> str:
        """The caption if there is one, and the table; the first column is set as code."""
        lines = [f"| {' | '.join(self.headings)} |", f"|{'---|' * len(self.headings)}"]
        lines += [f"| {' | '.join((f'`{first}`', *rest))} |" for first, *rest in self.rows]
        above = [self.caption, ""] if self.caption else []
        return "\n".join([*above, *lines, ""])

    def html(self) -> str:
        """The same as HTML; all text is escaped, and a narrow page scrolls the table alone."""
        head = "".join(f"<th>{escape(one)}</th>" for one in self.headings)
        above = f"<caption>{escape(self.caption)}</caption>" if self.caption else ""
        rows = "".join(f"<tr>{_cells(row)}</tr>" for row in self.rows)
        table = f"<table>{above}<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
        return f'<div style="overflow-x: auto">{table}</div>'


def _cells(row: Iterable[str]) -> str:
    first, *rest = map(escape, row)
    return "".join(f"<td>{one}</td>" for one in (f"<code>{first}</code>", *rest))
