"""Tables of text."""

from dataclasses import dataclass


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
