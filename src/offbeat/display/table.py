"""Tables of text, rendered as Markdown or HTML."""

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True)
class Table:
    """Text in rows and columns. The first column contains the names of the rows.

    Attributes:
        headings: One heading per column.
        rows: Rows of cells, one cell per heading.
        caption: Caption of one line. Empty: no caption.
    """

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""

    def markdown(self) -> str:
        """Return caption and table as Markdown. The first column is formatted as code."""
        lines = [f"| {' | '.join(self.headings)} |", f"|{'---|' * len(self.headings)}"]
        lines += [f"| {' | '.join((f'`{first}`', *rest))} |" for first, *rest in self.rows]
        above = [self.caption, ""] if self.caption else []
        return "\n".join([*above, *lines, ""])

    def html(self) -> str:
        """Return caption and table as HTML. On a narrow page the table scrolls, not the page."""
        head = "".join(f"<th>{escape(heading)}</th>" for heading in self.headings)
        above = f"<caption>{escape(self.caption)}</caption>" if self.caption else ""
        rows = "".join(f"<tr>{_cells(row)}</tr>" for row in self.rows)
        table = f"<table>{above}<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
        return f'<div style="overflow-x: auto">{table}</div>'


def _cells(row: Iterable[str]) -> str:
    first, *rest = map(escape, row)
    return "".join(f"<td>{cell}</td>" for cell in (f"<code>{first}</code>", *rest))
