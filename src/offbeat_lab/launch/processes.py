"""Runs a job on worker processes of this machine: starts, monitors and ends the processes."""

import contextlib
import io
import math
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from operator import itemgetter
from typing import Any, TypeAlias

import torch

from offbeat import OffbeatError, Stats
from offbeat_lab.evaluation import Snapshot
from offbeat_lab.events import Event, Start, stats_of
from offbeat_lab.job import Job
from offbeat_lab.launch.cluster import Cluster, run_cleanup
from offbeat_lab.launch.elastic import evaluate_kept
from offbeat_lab.launch.worker import WorkerProcess
from offbeat_lab.scenario import Scenario

_GRACE_SECONDS = 1.0  # after an error, which may be due to another worker that was killed
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
    with tempfile.TemporaryDirectory(prefix="offbeat-") as folder:
        run = _Run(job, on_event, folder, cluster)
        try:
            for rank in range(job.workers):
                run.start(rank)
            run.wait([*changes, *run.deaths_and_joins()])
        finally:
            run_cleanup(run.kill)
    if run.elastic:
        kept = [one for worker in run.workers for one in worker.snapshots]
        stats = [worker.stats for worker in run.workers if worker.stats is not None]
        evaluate_kept(job, kept, stats, on_event)


@dataclass
class _Worker:
    """The process of a worker, and what it has sent.

    Attributes:
        process: The process.
        pipe: Read end of the pipe of its messages; see ``WorkerProcess.run``.
        ended: True if it was killed as its scenario says.
        error: Its error. Empty: none.
        failed_at: Time at which the error has arrived.
        stats: Its totals so far, if workers die and join.
        snapshots: Its snapshots, if workers die and join.
    """

    process: BaseProcess
    pipe: connection.Connection
    ended: bool = False
    error: str = ""
    failed_at: float = math.inf
    stats: Stats | None = None
    snapshots: list[Snapshot] = field(default_factory=list)

    @property
    def status(self) -> int | None:
        """The exit status, 0 if the worker was ended. None: it runs."""
        status = self.process.exitcode
        return status if status is None or not self.ended else 0

    def read(self) -> Iterator[Event]:
        """Store the messages that have arrived, and yield those that are events. Never blocks."""
        with contextlib.suppress(EOFError):
            while self.pipe.poll():
                match message := pickle.loads(self.pipe.recv_bytes()):
                    case str():
                        self.error, self.failed_at = message, time.monotonic()
                    case dict():
                        self.stats = stats_of(message)
                    case bytes():
                        values = torch.load(io.BytesIO(message), weights_only=True)
                        self.snapshots.append(Snapshot(**values))
                    case _:
                        yield message

    def kill(self) -> None:
        """Kill the process, and those that it has started."""
        assert self.process.pid is not None
        for kill in (os.killpg, os.kill):  # a new process may not be in its group yet
            with contextlib.suppress(ProcessLookupError):
                kill(self.process.pid, signal.SIGKILL)


class _Run:
    """The worker processes of one job.

    Args:
        job: The run.
        on_event: Function that receives the events.
        folder: Folder for the files of the workers.
        cluster: Emulated network. None: use the loopback interface.

    Attributes:
        workers: The workers that were started, by rank.
        elastic: True if workers die and join.
    """

    def __init__(
        self, job: Job, on_event: Callable[[Event], None], folder: str, cluster: Cluster | None
    ) -> None:
        self._job, self._on_event, self._folder, self._cluster = job, on_event, folder, cluster
        scenario = Scenario.from_json(job.scenario)
        self.elastic, self._processes = scenario.elastic, scenario.processes(job.workers)
        self.workers: list[_Worker] = []

    def start(self, rank: int) -> None:
        """Start the worker with the next rank, on the cluster if there is one.

        If workers die and join, they gather at a store in a file.
        """
        cluster, variables = self._cluster, {}
        if self.elastic:
            variables = {
                "OFFBEAT_STORE": f"file://{self._folder}/store",
                "OFFBEAT_WORKERS": str(self._job.workers),
            }
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        interface = loopback if cluster is None else cluster.interface
        worker = WorkerProcess(
            self._job,
            rank,
            self._folder,
            elastic=self.elastic,
            node=None if cluster is None else cluster.node(self._processes[rank].worker),
            environment={**os.environ, **variables, "GLOO_SOCKET_IFNAME": interface},
        )
        self.workers.append(_start(worker))

    def deaths_and_joins(self) -> Iterator[Change]:
        """Yield the changes of the job's scenario."""
        for rank, process in enumerate(self._processes):
            if rank >= self._job.workers:
                yield process.start, partial(self.start, rank)
            if process.end < math.inf:
                yield process.end, partial(self._end, rank)

    def _end(self, rank: int) -> None:
        """Kill a worker, whose end is then not a failure."""
        worker = self.workers[rank]
        if worker.process.exitcode is None:
            worker.ended = True
            worker.kill()

    def wait(self, changes: Sequence[Change]) -> None:
        """Pass on events until all workers have ended or, after a failure, for at most 1 s.

        Raises WorkerError if a worker failed, and the error of a change.
        """
        due, start, deadline = sorted(changes, key=itemgetter(0)), math.inf, math.inf
        while True:
            # Before reading: all messages of a worker that has ended here are read below.
            statuses = {rank: worker.status for rank, worker in enumerate(self.workers)}
            for event in (event for worker in self.workers for event in worker.read()):
                if isinstance(event, Start):
                    start = time.monotonic()
                self._on_event(event)
            while due and time.monotonic() >= start + due[0][0]:
                due.pop(0)[1]()
            if all(status == 0 for status in statuses.values()):
                return
            if any(statuses.values()):
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
                killed = any(status is not None and status < 0 for status in statuses.values())
                if killed or None not in statuses.values() or time.monotonic() >= deadline:
                    raise self._failure(statuses)
            until = min(deadline, start + due[0][0] if due else math.inf)
            left = None if until == math.inf else max(0.0, until - time.monotonic())
            running = [w for rank, w in enumerate(self.workers) if statuses.get(rank) is None]
            ends = [worker.process.sentinel for worker in running]
            connection.wait([*ends, *(worker.pipe for worker in running)], left)

    def _failure(self, statuses: Mapping[int, int | None]) -> WorkerError:
        """Return the error of a worker that was killed, or else of the one that failed first."""
        for rank, status in statuses.items():
            if status is not None and status < 0:
                return WorkerError(f"worker {rank} was ended by {signal.Signals(-status).name}")
        failed = [rank for rank in statuses if statuses[rank] or self.workers[rank].error]
        first = min(failed, key=lambda rank: self.workers[rank].failed_at)
        error = self.workers[first].error or f"exit status {statuses[first]}"
        return WorkerError(f"worker {first} failed: {error}")

    def kill(self) -> None:
        """Kill the workers that still run, and wait until all have ended."""
        for worker in self.workers:
            worker.kill()
        for worker in self.workers:
            worker.process.join(_END_SECONDS)
            worker.pipe.close()


def _start(worker: WorkerProcess) -> _Worker:
    """Start the process of a worker. On Linux it is a fork of a process that has imported torch."""
    read, write = multiprocessing.Pipe(duplex=False)
    forks = sys.platform == "linux"
    context: Any = multiprocessing.get_context("forkserver" if forks else "spawn")
    if forks:
        context.set_forkserver_preload(_PRELOADED)
    process = context.Process(target=worker.run, args=(write,), name=f"rank{worker.rank}")
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")  # otherwise the worker would import it
    try:
        process.start()
    except EOFError:
        raise OffbeatError("the process that starts workers has ended") from None
    finally:
        sys.modules["__main__"] = main
        write.close()
    return _Worker(process, read)
