"""Runs a job on worker processes of this machine: starts, monitors and ends the processes."""

import contextlib
import math
import multiprocessing
import os
import selectors
import shutil
import signal
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from operator import itemgetter
from pathlib import Path
from typing import TypeAlias

from offbeat import OffbeatError
from offbeat_lab.events import Event, Start, from_json
from offbeat_lab.job import Job
from offbeat_lab.launch.cluster import Cluster, run_cleanup
from offbeat_lab.launch.elastic import evaluate_kept, read_files
from offbeat_lab.launch.worker import WorkerProcess
from offbeat_lab.scenario import Scenario

_POLL_SECONDS = 0.05  # longest time until the end of a worker is noticed
_GRACE_SECONDS = 8.0  # longest wait for the other workers' errors after one worker has failed
_END_SECONDS = 10.0  # longest wait for the end of a killed worker
_PRELOADED = ["offbeat.launcher.preloaded", "offbeat_lab.launch.worker"]
"""Modules that the fork server imports. The first one imports what otherwise takes each worker
seconds, such as what the first optimizer needs."""
Change: TypeAlias = tuple[float, Callable[[], object]]
"""Seconds since the event ``Start``, and a function that changes something then."""


class WorkerError(OffbeatError):
    """A worker process failed or was killed."""


def run_job(
    job: Job,
    on_event: Callable[[Event], None],
    cluster: Cluster | None = None,
    changes: Sequence[Change] = (),
) -> None:
    """Run ``job`` on one process per worker and end every process before returning or raising.

    The process of a worker that dies in the job's scenario is killed at that time, and one of a
    worker that joins is started then.

    Args:
        job: Configuration of the run.
        on_event: Function that receives the events of rank 0; see ``Worker``.
        cluster: Emulated network with a node for each worker. None: use the loopback interface.
        changes: Further changes during the training. Those after its end are not made.

    Raises:
        OffbeatError: On Windows, where worker processes are not supported.
        WorkerError: A worker failed, or was killed and does not die in the scenario. The message
            has its rank and its error.
    """
    if sys.platform == "win32":
        raise OffbeatError(
            "worker processes need Linux or macOS; on Windows use offbeat compare --simulate"
        )
    scenario = Scenario.from_json(job.scenario)
    processes = [*enumerate(scenario.processes(job.workers))]
    with _temporary_folder() as folder:
        read, write = multiprocessing.Pipe(duplex=False)
        with read, write:
            run = _Run(job, read, on_event, folder, cluster)
            try:
                for rank in range(job.workers):
                    run.start(rank, write)
                joins = [(p.start, partial(run.start, rank, write)) for rank, p in processes]
                deaths = [(p.end, partial(run.end, rank)) for rank, p in processes]
                run.wait([*changes, *joins[job.workers :], *deaths])
            finally:
                run_cleanup(run.kill)
        if scenario.elastic:
            evaluate_kept(job, *read_files(folder), on_event)


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
        job: The run.
        events: Read end of the pipe to which rank 0 writes its events.
        on_event: Function that receives the events.
        folder: Folder for the files of the workers.
        cluster: Emulated network. None: use the loopback interface.
    """

    def __init__(
        self,
        job: Job,
        events: Connection,
        on_event: Callable[[Event], None],
        folder: str,
        cluster: Cluster | None,
    ) -> None:
        self.job, self.folder = job, folder
        self._events, self._on_event, self._cluster = events.fileno(), on_event, cluster
        self._workers: list[BaseProcess] = []
        self._ended: set[int] = set()  # ranks of the workers that ``end`` has killed
        self._buffer = b""
        scenario = Scenario.from_json(job.scenario)
        self._elastic, self._processes = scenario.elastic, scenario.processes(job.workers)
        os.set_blocking(self._events, False)

    def start(self, rank: int, events: Connection) -> None:
        """Start the worker with the next rank, on the cluster if there is one.

        The worker that has rank 0 in the training writes to ``events``. If workers die and join,
        they gather at a store in a file, and after a death another one may have this rank.
        """
        cluster, variables = self._cluster, {}
        if self._elastic:
            variables = {
                "OFFBEAT_STORE": f"file://{self.folder}/store",
                "OFFBEAT_WORKERS": str(self.job.workers),
            }
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        interface = loopback if cluster is None else cluster.interface
        worker = WorkerProcess(
            self.job,
            rank,
            self.folder,
            elastic=self._elastic,
            node=None if cluster is None else cluster.node(self._processes[rank].worker),
            environment={**os.environ, **variables, "GLOO_SOCKET_IFNAME": interface},
            events=events,
        )
        Path(worker.errors).touch()
        self._workers.append(_start(worker))

    def end(self, rank: int) -> None:
        """Kill a worker, whose end is then not a failure."""
        if self._workers[rank].exitcode is None:
            self._ended.add(rank)
            _kill(self._workers[rank])

    def _poll(self) -> list[int | None]:
        """Return the exit status of each worker, 0 if ``end`` has killed it. None: it runs."""
        statuses = [worker.exitcode for worker in self._workers]
        return [0 if s is not None and r in self._ended else s for r, s in enumerate(statuses)]

    def _read(self) -> list[bytes]:
        """Return the complete lines that have arrived. Never blocks."""
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self._events, 1 << 16):
                self._buffer += chunk
        *lines, self._buffer = self._buffer.split(b"\n")
        return lines

    def wait(self, changes: Sequence[Change]) -> None:
        """Pass on events until all workers have ended or, after a failure, for at most 8 s.

        Raises WorkerError if a worker failed, and the error of a change.
        """
        deadline: float | None = None
        due, start = sorted(changes, key=itemgetter(0)), math.inf
        with selectors.DefaultSelector() as selector:
            selector.register(self._events, selectors.EVENT_READ)
            while True:
                # Poll before reading: all lines of a worker that has ended here are read below.
                statuses = self._poll()
                left = start + due[0][0] - time.monotonic() if due else _POLL_SECONDS
                selector.select(timeout=max(0.0, min(left, _POLL_SECONDS)))
                for line in self._read():
                    event = from_json(line)
                    if isinstance(event, Start):
                        start = time.monotonic()
                    self._on_event(event)
                while due and time.monotonic() >= start + due[0][0]:
                    due.pop(0)[1]()
                if all(status == 0 for status in statuses):
                    return
                if any(statuses):
                    deadline = deadline or time.monotonic() + _GRACE_SECONDS
                    killed = any(status is not None and status < 0 for status in statuses)
                    if killed or None not in statuses or time.monotonic() > deadline:
                        raise _failure(statuses, Path(self.folder))

    def kill(self) -> None:
        """Kill the workers that still run, and wait until all have ended."""
        for worker in self._workers:
            _kill(worker)
        for worker in self._workers:
            worker.join(_END_SECONDS)


def _start(worker: WorkerProcess) -> BaseProcess:
    """Start the process of a worker. On Linux it is a fork of a process that has imported torch."""
    name = f"rank{worker.rank}"
    process: BaseProcess
    if sys.platform == "linux":
        forks = multiprocessing.get_context("forkserver")
        forks.set_forkserver_preload(_PRELOADED)
        process = forks.Process(target=worker.run, name=name)
    else:
        process = multiprocessing.get_context("spawn").Process(target=worker.run, name=name)
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")  # otherwise the worker would import it
    try:
        process.start()
    except EOFError:
        raise OffbeatError("the process that starts workers has ended") from None
    finally:
        sys.modules["__main__"] = main
    return process


def _kill(worker: BaseProcess) -> None:
    assert worker.pid is not None
    for kill in (os.killpg, os.kill):  # a new process may not be in its group yet
        with contextlib.suppress(ProcessLookupError):
            kill(worker.pid, signal.SIGKILL)


def _failure(statuses: list[int | None], folder: Path) -> WorkerError:
    """Return the error of a worker that was killed, or else of the failed worker of lowest rank.

    The text for a killed worker is the signal. Otherwise it is the last line on standard error that
    begins with "error: ", which ``train.main`` writes (other code may write further lines).
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
