"""Start worker processes on this machine, listen to rank 0, and leave none behind."""

import contextlib
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol

from offbeat.errors import OffbeatError
from offbeat.lab import forking
from offbeat.lab.cleanup import surely
from offbeat.lab.events import Event, Left, Unsaved, from_json
from offbeat.lab.job import Job
from offbeat.lab.leaving import Leaving
from offbeat.lab.train import encode

_SAVING_SECONDS = 10.0  # after a signal: how long workers may take to save and leave
_GRACE_SECONDS = 8.0  # after one worker failed: how long the others may take to say why


class WorkerError(OffbeatError):
    """A worker process ended before its work was done."""


class Nodes(Protocol):
    """Where worker processes run, one a node."""

    @property
    def interface(self) -> str:
        """Name of the network interface that joins them, for ``GLOO_SOCKET_IFNAME``."""

    def command(self, rank: int, argv: Sequence[str]) -> list[str] | None:
        """The command that runs ``argv`` on the node of worker ``rank``.

        None: that is where this process runs, and nothing has to be done to get there.
        """


class Worker(Protocol):
    """A process that has been started; see ``subprocess.Popen``."""

    @property
    def pid(self) -> int:
        """Of the process, and of its group."""

    def poll(self) -> int | None:
        """The exit status, negative after a signal; None while the process runs."""

    def wait(self) -> int:
        """The exit status, once there is one."""


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
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": nodes.interface}
        workers: list[Worker] = []
        told, tell = os.pipe()
        with open(told, "rb", buffering=0) as events:
            try:
                with open(tell, "wb", buffering=0) as heard, open(os.devnull, "wb") as unheard:
                    for rank in range(job.workers):
                        argument = encode(job, rank, f"{folder}/rendezvous", leaving)
                        out = heard if rank == 0 else unheard
                        with open(f"{folder}/stderr{rank}", "wb") as errors:
                            workers.append(_start(nodes, rank, argument, environment, out, errors))
                _listen(workers, events, on_event, Path(folder))
            except BaseException as error:
                if leaving is not None and not isinstance(error, Exception):  # asked to end
                    asked = Leaving(leaving, job.workers)
                    _let_leave(asked, workers, events, on_event, Path(folder))
                raise
            finally:
                surely(lambda: _end(workers))


def _start(
    nodes: Nodes,
    rank: int,
    argument: str,
    environment: Mapping[str, str],
    out: IO[bytes],
    errors: IO[bytes],
) -> Worker:
    """Start worker ``rank``, as a fork where it can be one."""
    argv = [sys.executable, "-m", "offbeat.lab.train", argument]
    elsewhere = nodes.command(rank, argv)
    if elsewhere is None and forking.POSSIBLE:
        return forking.fork(argument, environment, out.fileno(), errors.fileno())
    return subprocess.Popen(
        argv if elsewhere is None else elsewhere,
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=errors,
        env=environment,
        preexec_fn=forking.prepare_worker,
    )


def _let_leave(
    leaving: Leaving,
    workers: Sequence[Worker],
    events: IO[bytes],
    on_event: Callable[[Event], None],
    folder: Path,
) -> None:
    """Let all workers save at one step, and end; those that have not are ended soon."""
    deadline = time.monotonic() + _SAVING_SECONDS
    if not workers or leaving.ask(_SAVING_SECONDS) is None:
        return
    os.set_blocking(events.fileno(), False)
    buffer, saved = b"", False
    while time.monotonic() < deadline:
        codes = [worker.poll() for worker in workers]
        while chunk := events.read(1 << 16):
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
        codes = [worker.poll() for worker in workers]
        why = str(_failure(codes, folder)) if any(codes) else ""
        on_event(Unsaved(why or f"not all workers had saved within {_SAVING_SECONDS:g} s"))


def _end(workers: Sequence[Worker]) -> None:
    """Kill those that live; leave nothing of them."""
    for worker in workers:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.pid, signal.SIGKILL)
    for worker in workers:
        worker.wait()


@contextlib.contextmanager
def _temporary_folder() -> Iterator[str]:
    """One that is gone afterwards, whatever comes."""
    folder = tempfile.mkdtemp(prefix="offbeat-")
    try:
        yield folder
    finally:
        surely(lambda: shutil.rmtree(folder, ignore_errors=True))


def _listen(
    workers: Sequence[Worker],
    events: IO[bytes],
    on_event: Callable[[Event], None],
    folder: Path,
) -> None:
    os.set_blocking(events.fileno(), False)
    buffer = b""
    deadline: float | None = None
    with selectors.DefaultSelector() as selector:
        selector.register(events, selectors.EVENT_READ)
        while True:
            codes = [worker.poll() for worker in workers]
            selector.select(timeout=0.2)
            while chunk := events.read(1 << 16):
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
    """The error of a worker that was killed, else of the first that said something.

    What others' threads have written after it, as torchft's servers do, is left out.
    """
    for rank, code in enumerate(codes):
        if code is not None and code < 0:
            return WorkerError(f"worker {rank} was ended by {signal.Signals(-code).name}")
    for rank, code in enumerate(codes):
        if code:
            words = (folder / f"stderr{rank}").read_text(errors="replace").strip().splitlines()
            told = [line for line in words if line.startswith("error: ")] or words
            last = told[-1].removeprefix("error: ") if told else f"exit status {code}"
            return WorkerError(f"worker {rank} failed: {last}")
    return WorkerError("a worker failed")
