"""A small file system that can be filled."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(path: Path) -> Iterator[Path]:
    """Mount a disk of one megabyte at ``path``. Skips the test where that is not allowed."""
    if os.geteuid() != 0:
        pytest.skip("mounting a disk needs root")
    path.mkdir()
    argv = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        pytest.skip(f"no disk can be mounted here: {done.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], timeout=30, check=True)


def fill(disk: Path) -> None:
    """Fill the disk."""
    with contextlib.suppress(OSError), (disk / "filler").open("ab", buffering=0) as file:
        while True:
            file.write(bytes(4096))
