"""A disk that is really full."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

MEGABYTE = 2**20


@contextlib.contextmanager
def small_disk(path: Path) -> Iterator[Path]:
    """One of a megabyte at ``path``, unmounted whatever comes. Skips where none can be made."""
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
    """Leave no room on it."""
    with contextlib.suppress(OSError), (disk / "filler").open("ab", buffering=0) as file:
        while True:
            file.write(bytes(4096))
