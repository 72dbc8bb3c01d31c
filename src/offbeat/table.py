"""A table as a value: made once, shown as Markdown, on a page or on a terminal."""

from dataclasses import dataclass


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
