"""Reads the lines that are appended to a file while another process writes it."""

import os
from pathlib import Path

MOST_BYTES = 1 << 20
"""Most bytes that ``Tail`` reads at once, so that it reads a file of any size in little time."""


class Tail:
    """Returns the new lines of a file each time it is asked.

    A line is returned when its newline has been written. If more than ``MOST_BYTES`` are new, only
    the lines within the last ``MOST_BYTES`` are returned. If the file no longer has the last line
    that was returned, it was truncated or replaced, and is read again from its start.

    Attributes:
        modified: Time of the last change of the file, in seconds since the epoch.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last, self._end = b"", 0  # last line that was returned, and its end in the file
        self.modified = 0.0

    def lines(self) -> list[bytes]:
        """Return the complete lines since the last call; an empty list if the file is missing."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:  # a rotated file may appear again
            return []
        with file:
            status = os.fstat(file.fileno())
            self.modified = status.st_mtime
            file.seek(self._end - len(self._last))
            if file.read(len(self._last)) != self._last:
                self._last, self._end = b"", 0
            start = max(self._end, status.st_size - MOST_BYTES)
            file.seek(start)
            lines = file.read(MOST_BYTES).splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):
            lines.pop()
        skipped = start > self._end  # the beginning of the first line, too
        if lines:
            self._last, self._end = lines[-1], start + sum(map(len, lines))
        return lines[1:] if skipped else lines
