"""Helpers that start the command line and find its processes."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

COMMAND = (sys.executable, "-m", "offbeat.cli")
LIMIT = 100.0  # seconds any process here may take
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if name not in TORCHRUN},
    **{"COLUMNS": "200", "NO_COLOR": "1", "PYTHONIOENCODING": "utf-8"},
    **{"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
}
PNG = b"\x89PNG\r\n\x1a\n"

Ended = tuple[int, str, str]
"""Exit code, standard output and standard error."""
Call = Callable[..., Ended]


def plain(text: str) -> str:
    """Remove colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def one_line(text: str) -> str:
    """Remove line breaks."""
    return re.sub(r"\s+", " ", text)


def until(condition: Callable[[], bool], what: str, seconds: float = LIMIT) -> None:
    """Poll until ``condition`` holds; fail if it does not within ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.02)


@contextlib.contextmanager
def started(*argv: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Start a process that Ctrl-C can end; kill it at the end of the block."""
    # Where the suite is a script's background job, SIGINT is ignored, and a child would inherit
    # that. Of a signal that is handled here, it gets the default.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            env={**ENVIRONMENT, **environment},
        )
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=10)


def ended(*argv: str, **environment: str) -> Ended:
    """Run a process to its end."""
    with started(*argv, **environment) as process:
        out, err = process.communicate(timeout=LIMIT)
        return process.returncode, plain(out), plain(err)


# Processes of workers


def alive(pid: int) -> bool:
    """Return True if the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def workers_writing(log: Path) -> dict[int, int]:
    """Return the process of each rank, which holds the rank's file of records open."""
    ranks = {str(log.with_suffix(f".rank{rank}.jsonl")): rank for rank in range(2)}
    found = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # gone, or another's
            for file in os.listdir(f"/proc/{entry}/fd"):
                rank = ranks.get(os.readlink(f"/proc/{entry}/fd/{file}"))
                if rank is not None:
                    found[rank] = int(entry)
    return found


LONG = ("compare", "digits", "--workers", "2", "--epochs", "600")  # 13,000 steps: minutes


@contextlib.contextmanager
def training(log: Path) -> Iterator[tuple[subprocess.Popen[str], dict[int, int]]]:
    """Start ``LONG``, wait until both workers have recorded a step, and yield their processes."""
    ranks = [log.with_suffix(f".rank{rank}.jsonl") for rank in range(2)]

    def under_way() -> bool:
        assert process.poll() is None, process.communicate()
        return all(path.exists() and b"\n" in path.read_bytes() for path in ranks)

    scratch = str(log.parent)  # a killed process cannot remove its temporary folder
    with started(*COMMAND, *LONG, "--records", str(log), TMPDIR=scratch) as process:
        try:
            until(under_way, "a step of every worker")
            pids = workers_writing(log)
            assert sorted(pids) == [0, 1]
            yield process, pids
        finally:
            for pid in workers_writing(log).values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
