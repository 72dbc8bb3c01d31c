"""Output of workers: complete lines, each with the number of its worker."""

import contextlib
import multiprocessing
import os
import selectors
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

_PROGRESS_SECONDS = 5.0  # least time between two lines from a progress bar
_LONGEST_LINE = 1 << 16  # bytes after which an unfinished line is written
_MOST_READS = 16  # from one worker before the others; more than a pipe holds


def report(text: str) -> None:
    """Write a line of the launcher itself to standard error, if that is possible."""
    _write(2, f"offbeat: {text}\n".encode(errors="replace"))


class Lines:
    """Splits the output of one worker into lines with a prefix.

    A progress bar writes carriage returns instead of line ends. Of such a line the text after the
    last one is shown, at most every 5 s until the line is complete.

    Args:
        prefix: Text before each line.
    """

    def __init__(self, prefix: bytes) -> None:
        self._prefix = prefix
        self._rest = b""
        self._shown_at = 0.0

    def feed(self, data: bytes) -> bytes:
        """Return the lines that are complete after ``data``. Empty data is the end of the output.

        The output may lack the last line end; it is then added.
        """
        if not data and self._rest:
            data = b"\n"
        *lines, self._rest = (self._rest + data).split(b"\n")
        now = time.monotonic()
        progress = b"\r" in self._rest and now >= self._shown_at + _PROGRESS_SECONDS
        if progress or len(self._rest) > _LONGEST_LINE:
            lines.append(self._rest)
            self._rest = b""
            self._shown_at = now
        return b"".join(self._prefix + _visible(line) + b"\n" for line in lines)


def _visible(line: bytes) -> bytes:
    """Return the part of a line that a terminal shows after its carriage returns."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


class Outputs:
    """The pipes from which the launcher reads the output of its workers."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    @contextlib.contextmanager
    def open(self, number: int) -> Iterator[tuple[Connection, Connection]]:
        """Provide two new pipes for standard output and error of worker ``number``.

        The launcher's ends are closed at the end of the context, when the worker has its own.
        """
        with contextlib.ExitStack() as stack:
            ends = []
            for target in (1, 2):
                read, write = multiprocessing.Pipe(duplex=False)
                ends.append(stack.enter_context(write))
                os.set_blocking(read.fileno(), False)
                data = (Lines(f"[{number}] ".encode()), target)
                self._selector.register(read, selectors.EVENT_READ, data)
            yield ends[0], ends[1]

    def copy(self, seconds: float) -> None:
        """Wait at most ``seconds`` for output, and write what has arrived."""
        if not self._selector.get_map():
            time.sleep(seconds)
            return
        for key, _ in self._selector.select(seconds):
            self._copy_one(key)

    def _copy_one(self, key: selectors.SelectorKey) -> None:
        lines, target = key.data
        with contextlib.suppress(BlockingIOError):
            for _ in range(_MOST_READS):
                data = os.read(key.fd, 1 << 16)
                _write(target, lines.feed(data))
                if not data:
                    self._close_one(key)
                    return

    def _close_one(self, key: selectors.SelectorKey) -> None:
        self._selector.unregister(key.fileobj)
        assert isinstance(key.fileobj, Connection)
        key.fileobj.close()

    def close(self) -> None:
        """Write what has arrived, and close all pipes.

        A pipe may still be open in a process that a worker has started.
        """
        for key in [*self._selector.get_map().values()]:
            self._copy_one(key)
        for key in [*self._selector.get_map().values()]:
            lines, target = key.data
            _write(target, lines.feed(b""))
            self._close_one(key)
        self._selector.close()


def _write(target: int, text: bytes) -> None:
    """Write to a file descriptor. What cannot be written is lost: the workers train on.

    The reader may have ended, as in ``| head``, or the disk may be full.
    """
    with contextlib.suppress(OSError):
        while text:
            text = text[os.write(target, text) :]
