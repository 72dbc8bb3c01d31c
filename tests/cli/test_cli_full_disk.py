"""The command line on a disk that is really full: one line names the file or the reason."""

import errno
from pathlib import Path

import pytest

from cli.commands import Call
from disks import fill, small_disk
from offbeat_lab.results import writing

TABLE = Path("a", "table.md")


def test_results_that_do_not_fit_are_one_line(call: Call, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        argv = ("compare", "digits", "-s", "bsp", "--simulate", "--step-time", "20ms")
        out = disk / "out"
        out.mkdir()
        fill(disk)
        code, _, err = call(*argv, "-n", "2", "--epochs", "0.05", "--output", str(out))
    assert (code, err) == (2, f"error: {out}/results.jsonl: No space left on device\n")


def test_an_error_without_a_name_gets_that_of_the_file() -> None:
    with pytest.raises(OSError, match=r"No space left on device: 'a/table\.md'"), writing(TABLE):
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(FileNotFoundError, match="'other'"), writing(TABLE):
        Path("other").read_text()
