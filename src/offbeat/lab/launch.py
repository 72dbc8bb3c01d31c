"""Start worker processes on this machine, listen to rank 0, and leave none behind."""

import contextlib
import ctypes
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from offbeat.errors import OffbeatError
from offbeat.lab.cleanup import surely
from offbeat.lab.events import Event, Left, Unsaved, from_json
from offbeat.lab.job import Job
from offbeat.lab.leaving import Leaving
from offbeat.lab.train import encode

_PR_SET_PDEATHSIG = 1
_SAVING_SECONDS = 10.0  # after a signal: how long workers may take to save and leave
_GRACE_SECONDS = 8.0  # after one worker failed: how long the others may take to say why


class WorkerError(OffbeatError):
    """A worker process ended before its work was done."""


class Nodes(Protocol):
    """Where worker processes run, one a node."""

    @property
    def interface(self) -> str:
        """Name of the network interface that joins them, for ``GLOO_SOCKET_IFNAME``."""

    def command(self, rank: int, argv: Sequence[str]) -> list[str]:
        """The command that runs ``argv`` on the node of worker ``rank``."""


def _prepare_worker() -> None:
    """In the new process, before its program: end as usual, and with the parent at the latest."""
    # The terminal's Ctrl-C shall reach us alone. Not in a session of its own: Linux shares the
    # processor between sessions, and lets one of two that share a core starve for seconds.
    os.setpgid(0, 0)
    # A script's background job ignores SIGINT, and what it starts would inherit that.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":  # its kernel ends the process however the parent ended
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def run_job(job: Job, on_event: Callable[[Event], None], nodes: Nodes) -> None:
    """Run ``job`` on as many processes, one on each of ``nodes``.

    ``on_event`` is called with the events of rank 0; see ``train_worker``. Whatever ends this
    function, a Ctrl-C included, ends every process first. A job with checkpoints saves one more
    then, if it can within 10 s, and tells where in a ``Left``; or why not in an ``Unsaved``.

    Raises:
        WorkerError: a worker failed or was killed; the message names its rank and its last words.
    """
    with _temporary_folder() as folder:
        leaving = None if job.checkpoints is None else f"{folder}/leaving"
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(job.workers):
                told = encode(job, rank, f"{folder}/rendezvous", leaving)
                argv = [sys.executable, "-m", "offbeat.lab.train", told]
                with open(f"{folder}/stderr{rank}", "wb") as errors:
                    processes.append(
                        subprocess.Popen(
                            nodes.command(rank, argv),
                            stdin=subprocess.DEVNULL,
                            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                            stderr=errors,
                            env={**os.environ, "GLOO_SOCKET_IFNAME": nodes.interface},
                            preexec_fn=_prepare_worker,
                        )
                    )
            _listen(processes, on_event, Path(folder))
        except BaseException as error:
            if leaving is not None and not isinstance(error, Exception):  # asked to end
                _let_leave(Leaving(leaving, job.workers), processes, on_event, Path(folder))
            raise
        finally:
            surely(lambda: _end(processes))


def _let_leave(
    leaving: Leaving,
    processes: Sequence[subprocess.Popen[bytes]],
    on_event: Callable[[Event], None],
    folder: Path,
) -> None:
    """Let all workers save at one step, and end; those that have not are ended soon."""
    deadline = time.monotonic() + _SAVING_SECONDS
    if len(processes) == 0 or leaving.ask(_SAVING_SECONDS) is None:
        return
    pipe = processes[0].stdout
    assert pipe is not None
    buffer, saved = b"", False
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        while chunk := pipe.read(1 << 16):
            buffer += chunk
        *lines, buffer = buffer.split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError, KeyError):  # the signal came within a line
                event = from_json(line)
                saved = saved or isinstance(event, Left)
                on_event(event)
        if None not in codes or any(codes):
            break
        time.sleep(0.02)
    if not saved:
        failed = any(process.poll() for process in processes)
        why = str(_failure([p.poll() for p in processes], folder)) if failed else ""
        on_event(Unsaved(why or f"not all workers had saved within {_SAVING_SECONDS:g} s"))


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Kill those that live; leave nothing of them."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@contextlib.contextmanager
def _temporary_folder() -> Iterator[str]:
    """One that is gone afterwards, whatever comes."""
    folder = tempfile.mkdtemp(prefix="offbeat-")
    try:
        yield folder
    finally:
        surely(lambda: shutil.rmtree(folder, ignore_errors=True))


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
                on_event(from_json(line))
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
