"""The lines that a launcher makes of its workers' output."""

import errno
import os

import pytest

from offbeat.launcher import output
from offbeat.launcher.output import Lines, Outputs, report


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([b"a\nb\n"], b"[3] a\n[3] b\n"),
        ([b"a", b"b\nc", b"\n"], b"[3] ab\n[3] c\n"),
        ([b"a\n", b""], b"[3] a\n"),
        ([b"no line end", b""], b"[3] no line end\n"),
        ([b"\n"], b"[3] \n"),
        ([b"of Windows\r\n"], b"[3] of Windows\n"),
        ([b"\xff\n"], b"[3] \xff\n"),
    ],
)
def test_every_line_has_the_number_of_its_worker(pieces: list[bytes], expected: bytes) -> None:
    lines = Lines(b"[3] ")
    assert b"".join(map(lines.feed, pieces)) == expected


def test_a_progress_bar_is_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its newest state is shown, at most every 5 s until the line ends."""
    now = 100.0
    monkeypatch.setattr(output.time, "monotonic", lambda: now)
    lines = Lines(b"[0] ")
    assert lines.feed(b"\r 1%\r 2%") == b"[0]  2%\n"
    now += 4.9
    assert lines.feed(b"\r 3%") == b""
    now += 0.2
    assert lines.feed(b"\r 4%") == b"[0]  4%\n"
    assert lines.feed(b"\r 99%\r100%\nnext\n") == b"[0] 100%\n[0] next\n"


def test_a_line_without_end_is_cut() -> None:
    """A launcher does not keep all that a worker ever writes."""
    lines = Lines(b"")
    assert lines.feed(b"x" * (1 << 16)) == b""
    assert lines.feed(b"x") == b"x" * ((1 << 16) + 1) + b"\n"


def test_both_streams_are_copied_and_all_pipes_closed(
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc") else 0
    outputs = Outputs()
    with outputs.open(0) as (out, errors):
        os.write(out.fileno(), b"first\n")
        os.write(errors.fileno(), b"to errors\n")
        outputs.copy(1.0)
        os.write(out.fileno(), b"unfinished")
        held = os.dup(out.fileno())  # as in a process that the worker has started
    outputs.copy(1.0)
    outputs.close()
    os.close(held)
    assert capfdbinary.readouterr() == (b"[0] first\n[0] unfinished\n", b"[0] to errors\n")
    assert before == (len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc") else 0)


def test_output_that_cannot_be_written_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader has gone, as in ``| head``, or the disk is full, or the file is closed."""
    errors = iter([BrokenPipeError(), OSError(errno.ENOSPC, "full"), OSError(errno.EBADF, "bad")])
    asked: list[bytes] = []

    def write(target: int, data: bytes) -> int:
        asked.append(data)
        raise next(errors)

    outputs = Outputs()
    with outputs.open(0) as (out, _):
        os.write(out.fileno(), b"first\n")
        monkeypatch.setattr(output.os, "write", write)
        outputs.copy(1.0)
        report("second")
        monkeypatch.undo()
        os.write(out.fileno(), b"third\n")
        monkeypatch.setattr(output.os, "write", write)
        outputs.copy(1.0)
    monkeypatch.undo()
    outputs.close()
    assert asked == [b"[0] first\n", b"offbeat: second\n", b"[0] third\n"]


def test_a_long_text_may_take_several_writes(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    real = os.write
    monkeypatch.setattr(output.os, "write", lambda target, data: real(target, data[:4]))
    report("in parts")
    assert capfd.readouterr().err == "offbeat: in parts\n"
