"""Output of workers: complete lines, each with the number of its worker."""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

_PROGRESS_SECONDS = 5.0  # least time between two lines from a progress bar
_LONGEST_LINE = 1 << 16  # bytes after which an unfinished line is written


def report(text: str) -> None:
    """Write a line of the launcher itself to standard error, if that is possible."""
    write(2, f"offbeat: {text}\n".encode(errors="replace"))


def write(target: int, text: bytes) -> None:
    """Write to a file descriptor. What cannot be written is lost: the workers train on.

    The reader may have ended, as in ``| head``, or the disk may be full.
    """
    with contextlib.suppress(OSError):
        while text:
            text = text[os.write(target, text) :]


class Lines(asyncio.Protocol):
    """Passes on the lines that arrive through a pipe.

    A progress bar writes carriage returns instead of line ends. Of such a line the text after the
    last one is passed on, at most every 5 s until the line is complete.

    Args:
        on_line: Function to call with each line, without its line end.
    """

    def __init__(self, on_line: Callable[[bytes], None]) -> None:
        self._on_line = on_line
        self._rest = b""
        self._shown_at = 0.0
        self._ended = asyncio.Event()

    async def read(self, pipe: Connection) -> None:
        """Begin to read from ``pipe``."""
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.connect_read_pipe(lambda: self, pipe)

    async def close(self, seconds: float) -> None:
        """Wait for the end of the pipe for at most ``seconds``, and close it."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), seconds)
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        """Pass on the lines that are complete after ``data``."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        now = time.monotonic()
        progress = b"\r" in self._rest and now >= self._shown_at + _PROGRESS_SECONDS
        if progress or len(self._rest) > _LONGEST_LINE:
            lines.append(self._rest)
            self._rest, self._shown_at = b"", now
        for line in lines:
            self._on_line(line.rstrip(b"\r").rpartition(b"\r")[2])

    def connection_lost(self, error: Exception | None) -> None:
        """Pass on the last line, which may lack its end."""
        if self._rest:
            self.data_received(b"\n")
        self._ended.set()
