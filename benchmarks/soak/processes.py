"""The processes of one run."""

import contextlib
import ctypes
import faulthandler
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.soak.plan import Case
from benchmarks.soak.records import Progress, Run
from benchmarks.soak.worker import Rendezvous, main
from offbeat_lab.launch.cluster import Cluster

# torch resolves the name of every connection. Without this an unreachable name server blocks it
# for 5 s.
os.environ["RES_OPTIONS"] = "attempts:0"
_CLONE_NEWNET = 0x40000000


@dataclass
class Process:
    """A forked process.

    Attributes:
        rank: Rank of the worker.
        pid: Process identifier.
        status: Exit status, as of ``os.waitstatus_to_exitcode``; None while it runs.
    """

    rank: int
    pid: int
    status: int | None = None

    def poll(self) -> bool:
        """Return True if the process has ended."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
        return self.status is not None

    def send(self, number: int) -> None:
        """Send a signal unless the process has ended."""
        if not self.poll():
            os.kill(self.pid, number)

    def end(self) -> None:
        """Kill the process, and wait for its end."""
        self.send(signal.SIGKILL)
        while not self.poll():
            time.sleep(0.002)


@dataclass
class Scene:
    """A run in progress.

    Attributes:
        case: The fault.
        run: Instructions of the workers.
        folder: Directory of the files of the run.
        progress: Progress of each worker.
        processes: Processes of the workers by rank.
        cluster: Shaped links; None for loopback.
    """

    case: Case
    run: Run
    folder: Path
    progress: Progress
    processes: list[Process]
    cluster: Cluster | None

    def reported(self, rank: int) -> bool:
        """Return True if a worker has written its report or ended."""
        return self.processes[rank].poll() or (self.folder / f"report{rank}").exists()


@contextlib.contextmanager
def rendezvous(case: Case, folder: Path) -> Iterator[Rendezvous]:
    """Yield the store of a run."""
    if not case.own_store:
        yield Rendezvous(str(folder))
        return
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield Rendezvous(str(folder), "127.0.0.1", listener.getsockname()[1], listener)


def start(case: Case, run: Run, rank: int, place: Rendezvous, cluster: Cluster | None) -> Process:
    """Fork a worker, so that torch is imported only once."""
    folder = Path(place.folder)

    def work() -> int:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo" if cluster is None else cluster.interface
        os.environ["TMPDIR"] = tempfile.tempdir = str(folder / "scratch")
        return main(case, run, rank, place)

    namespace = None if cluster is None else cluster.command(rank, [])[3]
    return _fork(rank, folder / f"stderr{rank}", namespace, work)


def _fork(rank: int, stderr: Path, namespace: str | None, work: Callable[[], int]) -> Process:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return Process(rank, pid)
    status = 1
    try:
        os.setpgid(0, 0)  # so that the terminal's Ctrl-C reaches only the soak
        errors = os.open(stderr, os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(errors, 2)
        faulthandler.enable(errors, all_threads=True)
        if namespace is not None:
            _enter(namespace)
        status = work()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _enter(namespace: str) -> None:
    """Move this process into a network namespace."""
    with open(f"/run/netns/{namespace}", "rb") as file:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"entering namespace {namespace}")
