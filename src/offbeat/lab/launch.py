"""Start worker processes on this machine, listen to rank 0, and leave none behind."""

import contextlib
import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from offbeat.errors import OffbeatError
from offbeat.lab.cluster import Cluster
from offbeat.lab.train import Event, Job, encode

_PR_SET_PDEATHSIG = 1
_GRACE_SECONDS = 8.0  # after one worker failed: how long the others may take to say why


class WorkerError(OffbeatError):
    """A worker process ended before its work was done."""


def _die_with_parent() -> None:
    """Ask Linux to end this process when its parent ends, however that happens."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def run_job(job: Job, on_event: Callable[[Event], None], cluster: Cluster | None = None) -> None:
    """Run ``job`` on as many processes, on the nodes of ``cluster`` if given, else on loopback.

    ``on_event`` is called with the events of rank 0; see ``train_worker``. Whatever ends this
    function, a Ctrl-C included, ends every process first.

    Raises:
        WorkerError: a worker failed or was killed; the message names its rank and its last words.
    """
    with tempfile.TemporaryDirectory(prefix="offbeat-") as folder:
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(job.workers):
                argv = [
                    *(sys.executable, "-m", "offbeat.lab.train"),
                    encode(job, rank, f"{folder}/rendezvous"),
                ]
                interface = "lo"
                if cluster is not None:
                    argv, interface = cluster.command(rank, argv), cluster.interface
                with open(f"{folder}/stderr{rank}", "wb") as errors:
                    processes.append(
                        subprocess.Popen(
                            argv,
                            stdin=subprocess.DEVNULL,
                            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                            stderr=errors,
                            env={**os.environ, "GLOO_SOCKET_IFNAME": interface},
                            start_new_session=True,  # the terminal's Ctrl-C reaches us alone
                            preexec_fn=_die_with_parent,
                        )
                    )
            _listen(processes, on_event, Path(folder))
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            for process in processes:
                process.wait()
                if process.stdout is not None:
                    process.stdout.close()


def _listen(
    processes: list[subprocess.Popen[bytes]], on_event: Callable[[Event], None], folder: Path
) -> None:
    pipe = processes[0].stdout
    assert pipe is not None
    os.set_blocking(pipe.fileno(), False)
    buffer = b""
    deadline: float | None = None
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while True:
            codes = [process.poll() for process in processes]
            selector.select(timeout=0.2)
            while chunk := pipe.read(1 << 16):
                buffer += chunk
            *lines, buffer = buffer.split(b"\n")
            for line in lines:
                on_event(json.loads(line))
            if all(code == 0 for code in codes):
                return
            if any(codes):
                deadline = deadline or time.monotonic() + _GRACE_SECONDS
                if all(code is not None for code in codes) or time.monotonic() > deadline:
                    raise _failure(codes, folder)


def _failure(codes: list[int | None], folder: Path) -> WorkerError:
    """The error of a worker that was killed, else of the first that said something."""
    for rank, code in enumerate(codes):
        if code is not None and code < 0:
            return WorkerError(f"worker {rank} was ended by {signal.Signals(-code).name}")
    for rank, code in enumerate(codes):
        if code:
            words = (folder / f"stderr{rank}").read_text(errors="replace").strip().splitlines()
            last = words[-1].removeprefix("error: ") if words else f"exit status {code}"
            return WorkerError(f"worker {rank} failed: {last}")
    return WorkerError("a worker failed")
