"""The lines that a launcher makes of its workers' output."""

import asyncio
import errno
import multiprocessing
import os

import pytest

from offbeat.launcher import output
from offbeat.launcher.output import Lines, report


@pytest.fixture
def found() -> list[bytes]:
    """Lines that were passed on."""
    return []


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([b"a\nb\n"], [b"a", b"b"]),
        ([b"a", b"b\nc", b"\n"], [b"ab", b"c"]),
        ([b"no line end"], [b"no line end"]),
        ([b"\n"], [b""]),
        ([b"of Windows\r\n"], [b"of Windows"]),
        ([b"\xff\n"], [b"\xff"]),
    ],
)
def test_lines_are_passed_on(pieces: list[bytes], expected: bytes, found: list[bytes]) -> None:
    lines = Lines(found.append)
    for piece in pieces:
        lines.data_received(piece)
    lines.connection_lost(None)
    assert found == expected


def test_a_progress_bar_is_a_line_now_and_then(
    found: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its newest state is shown, at most every 5 s until the line ends."""
    now = 100.0
    monkeypatch.setattr(output.time, "monotonic", lambda: now)
    lines = Lines(found.append)
    lines.data_received(b"\r 1%\r 2%")
    assert found == [b" 2%"]
    now += 4.9
    lines.data_received(b"\r 3%")
    assert found == [b" 2%"]
    now += 0.2
    lines.data_received(b"\r 4%")
    lines.data_received(b"\r 99%\r100%\nnext\n")
    assert found == [b" 2%", b" 4%", b"100%", b"next"]


def test_a_line_without_end_is_cut(found: list[bytes]) -> None:
    """A launcher does not keep all that a worker ever writes."""
    lines = Lines(found.append)
    lines.data_received(b"x" * (1 << 16))
    assert found == []
    lines.data_received(b"x")
    assert found == [b"x" * ((1 << 16) + 1)]


def test_a_pipe_that_another_process_holds_is_closed(found: list[bytes]) -> None:
    """What has arrived is passed on."""
    read, write = multiprocessing.Pipe(duplex=False)

    async def copy() -> None:
        lines = Lines(found.append)
        await lines.read(read)
        os.write(write.fileno(), b"first\nunfinished")
        await lines.close(0.1)

    with write:
        asyncio.run(copy())
        assert found == [b"first", b"unfinished"]
        with pytest.raises(BrokenPipeError):
            os.write(write.fileno(), b"more")
    assert read.closed


def test_output_that_cannot_be_written_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader has gone, as in ``| head``, or the disk is full."""
    errors = iter([BrokenPipeError(), OSError(errno.ENOSPC, "full")])
    asked: list[bytes] = []

    def write(target: int, data: bytes) -> int:
        asked.append(data)
        raise next(errors)

    monkeypatch.setattr(output.os, "write", write)
    report("first")
    report("second")
    assert asked == [b"offbeat: first\n", b"offbeat: second\n"]


def test_a_long_text_may_take_several_writes(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    real = os.write
    monkeypatch.setattr(output.os, "write", lambda target, data: real(target, data[:4]))
    report("in parts")
    assert capfd.readouterr().err == "offbeat: in parts\n"
