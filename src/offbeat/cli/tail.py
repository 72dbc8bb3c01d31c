"""Reads the lines that are appended to a file while another process writes it."""

import os
from pathlib import Path

MOST_BYTES = 1 << 20
"""Most bytes that ``Tail`` reads at once, so that it reads a file of any size in little time."""


class Tail:
    """Returns the new lines of a file each time it is asked.

    A line is returned when its newline has been written. If more than ``MOST_BYTES`` are new, only
    the lines within the last ``MOST_BYTES`` are returned. A file that was truncated or replaced is
    read again from its start.

    Attributes:
        modified: Time of the last change of the file, in seconds since the epoch.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = self._offset = 0  # of the first byte not returned yet
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
            if status.st_ino != self._inode or status.st_size < self._offset:
                self._inode, self._offset = status.st_ino, 0
            start = max(self._offset, status.st_size - MOST_BYTES)
            file.seek(start)
            data = file.read(MOST_BYTES)
        complete = data.rfind(b"\n") + 1
        lines = data[:complete].splitlines()
        if start > self._offset:
            lines = lines[1:]  # its beginning was skipped
        if complete:
            self._offset = start + complete
        return lines
