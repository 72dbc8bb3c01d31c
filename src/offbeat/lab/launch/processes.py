"""Runs a job on worker processes of this machine: starts, monitors and ends the processes."""

import contextlib
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TypeAlias

from offbeat.errors import OffbeatError
from offbeat.lab.events import Event, NotSaved, Stopped, from_json
from offbeat.lab.job import Job
from offbeat.lab.launch import fork_server
from offbeat.lab.launch.cluster import Cluster, run_cleanup
from offbeat.lab.launch.stop_request import StopRequest
from offbeat.lab.train import encode
from offbeat.launcher import forking
from offbeat.launcher.forking import ForkedProcess

_SAVING_SECONDS = 10.0  # time that workers have to save and exit after a signal
_GRACE_SECONDS = 8.0  # longest wait for the other workers' errors after one worker has failed


Worker: TypeAlias = "ForkedProcess | subprocess.Popen[bytes]"


class WorkerError(OffbeatError):
    """A worker process failed or was killed."""


def run_job(job: Job, on_event: Callable[[Event], None], cluster: Cluster | None = None) -> None:
    """Run ``job`` on one process per worker and end every process before returning or raising.

    On Ctrl-C or SIGTERM during the training of a job with checkpoints, the workers get 10 s to save
    a last checkpoint. ``on_event`` then receives ``Stopped``, or ``NotSaved`` with the reason.

    Args:
        job: Configuration of the run.
        on_event: Function that receives the events of rank 0; see ``train_worker``.
        cluster: Emulated network with a node for each worker. None: use the loopback interface.

    Raises:
        OffbeatError: On Windows, where worker processes are not supported.
        WorkerError: A worker failed or was killed. The message has its rank and its error.
    """
    if sys.platform == "win32":
        raise OffbeatError(
            "worker processes need Linux or macOS; on Windows use offbeat simulate or "
            "offbeat compare --simulate"
        )
    with _temporary_folder() as folder:
        path = None if job.checkpoints is None else f"{folder}/stop"
        read, write = os.pipe()
        with open(read, "rb", buffering=0) as events:
            run = _Run(events, on_event, Path(folder))
            try:
                with open(write, "wb", buffering=0) as out, open(os.devnull, "wb") as nowhere:
                    for rank in range(job.workers):
                        argument = encode(job, rank, f"{folder}/rendezvous", path)
                        run.start(cluster, rank, argument, out if rank == 0 else nowhere)
                run.wait()
            except BaseException as error:
                if path is not None and not isinstance(error, Exception):  # a signal
                    run.save_and_stop(StopRequest(path, job.workers))
                raise
            finally:
                run_cleanup(run.kill)


@contextlib.contextmanager
def _temporary_folder() -> Iterator[str]:
    folder = tempfile.mkdtemp(prefix="offbeat-")
    try:
        yield folder
    finally:
        run_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


class _Run:
    """The worker processes of one job.

    Args:
        events: Read end of the pipe to which rank 0 writes its events.
        on_event: Function that receives the events.
        folder: Folder for the standard error of each worker.
    """

    def __init__(self, events: IO[bytes], on_event: Callable[[Event], None], folder: Path) -> None:
        self._events, self._on_event, self._folder = events, on_event, folder
        self._workers: list[Worker] = []
        self._buffer = b""
        os.set_blocking(events.fileno(), False)

    def start(self, cluster: Cluster | None, rank: int, argument: str, out: IO[bytes]) -> None:
        """Start worker ``rank``: on its node of the cluster, or else by a fork if possible."""
        argv = [sys.executable, "-m", "offbeat.lab.train", argument]
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        interface = loopback if cluster is None else cluster.interface
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": interface}
        with open(self._folder / f"stderr{rank}", "wb") as errors:
            if cluster is None and forking.AVAILABLE:
                worker: Worker = fork_server.fork_worker(
                    argument, environment, out.fileno(), errors.fileno()
                )
            else:
                worker = subprocess.Popen(
                    argv if cluster is None else cluster.command(rank, argv),
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=errors,
                    env=environment,
                    preexec_fn=forking.prepare_worker,
                )
        self._workers.append(worker)

    def _poll(self) -> list[int | None]:
        return [worker.poll() for worker in self._workers]

    def _read(self) -> list[bytes]:
        """Return the complete lines that have arrived. Never blocks."""
        while chunk := self._events.read(1 << 16):
            self._buffer += chunk
        *lines, self._buffer = self._buffer.split(b"\n")
        return lines

    def wait(self) -> None:
        """Pass on events until all workers have ended or, after a failure, for at most 8 s.

        Raises WorkerError if a worker failed.
        """
        deadline: float | None = None
        with selectors.DefaultSelector() as selector:
            selector.register(self._events, selectors.EVENT_READ)
            while True:
                # Poll before reading: all lines of a worker that has ended here are read below.
                statuses = self._poll()
                selector.select(timeout=0.2)
                for line in self._read():
                    self._on_event(from_json(line))
                if all(status == 0 for status in statuses):
                    return
                if any(statuses):
                    deadline = deadline or time.monotonic() + _GRACE_SECONDS
                    if None not in statuses or time.monotonic() > deadline:
                        raise _failure(statuses, self._folder)

    def save_and_stop(self, request: StopRequest) -> None:
        """Ask all workers to save a checkpoint of the same step and exit. Wait at most 10 s."""
        deadline = time.monotonic() + _SAVING_SECONDS
        if not self._workers or request.request(_SAVING_SECONDS) is None:
            return
        saved = False
        while time.monotonic() < deadline:
            statuses = self._poll()
            for line in self._read():
                # The signal may have interrupted `wait` between two reads of one line.
                with contextlib.suppress(ValueError, KeyError):
                    event = from_json(line)
                    saved = saved or isinstance(event, Stopped)
                    self._on_event(event)
            if None not in statuses or any(statuses):
                break
            time.sleep(0.02)
        if not saved:
            statuses = self._poll()
            reason = str(_failure(statuses, self._folder)) if any(statuses) else ""
            limit = f"not all workers saved within {_SAVING_SECONDS:g} s"
            self._on_event(NotSaved(reason or limit))

    def kill(self) -> None:
        """Kill the workers that still run, and wait until all have ended."""
        for worker in self._workers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
        for worker in self._workers:
            worker.wait()


def _failure(statuses: list[int | None], folder: Path) -> WorkerError:
    """Return the error of a worker that was killed, or else of the failed worker of lowest rank.

    The text for a killed worker is the signal. Otherwise it is the last line on standard error that
    begins with "error: ", which ``train.main`` writes (other packages may write further lines).
    Without such a line it is the last line of all, or the exit status.
    """
    for rank, status in enumerate(statuses):
        if status is not None and status < 0:
            return WorkerError(f"worker {rank} was ended by {signal.Signals(-status).name}")
    for rank, status in enumerate(statuses):
        if status:
            lines = (folder / f"stderr{rank}").read_text(errors="replace").strip().splitlines()
            errors = [line for line in lines if line.startswith("error: ")] or lines
            last = errors[-1].removeprefix("error: ") if errors else f"exit status {status}"
            return WorkerError(f"worker {rank} failed: {last}")
    return WorkerError("a worker failed")
