"""The processes of one run: workers, those that come later, and one that keeps the store."""

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
from benchmarks.soak.worker import Place, Progress, Run, keep, main
from offbeat.lab.launch.cluster import Cluster

# torch asks for the name of every connection, and a name server that is out of reach keeps it
# waiting for 5 s: nobody is asked.
os.environ["RES_OPTIONS"] = "attempts:0"
_CLONE_NEWNET = 0x40000000
_PORT = 29500  # of the store, in a namespace where there is nothing else


@dataclass
class Process:
    """One of them.

    Attributes:
        rank: Whose.
        pid: Its number.
        status: How it has ended, as by ``os.waitstatus_to_exitcode``.
    """

    rank: int
    pid: int
    status: int | None = None

    def poll(self) -> bool:
        """Whether it has ended."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
        return self.status is not None

    def send(self, number: int) -> None:
        """A signal, if it lives."""
        if not self.poll():
            os.kill(self.pid, number)

    def end(self) -> None:
        """Kill it, if it lives."""
        self.send(signal.SIGKILL)
        while not self.poll():
            time.sleep(0.002)


@dataclass
class Scene:
    """One run under way.

    Attributes:
        case: What happens in it.
        run: What the workers do.
        folder: Of its files.
        progress: How far each worker is.
        processes: By rank.
        cluster: Their links; None: loopback.
    """

    case: Case
    run: Run
    folder: Path
    progress: Progress
    processes: list[Process]
    cluster: Cluster | None

    def reported(self, rank: int) -> bool:
        """Whether a worker has come to its end."""
        return self.processes[rank].poll() or (self.folder / f"report{rank}").exists()


def nodes(case: Case) -> int:
    """How many links it takes."""
    return case.workers + case.newcomers + case.keeper


@contextlib.contextmanager
def meeting_place(case: Case, folder: Path, cluster: Cluster | None) -> Iterator[Place]:
    """Where the workers meet; afterwards it is gone."""
    if not case.keeper and not case.own_store:
        yield Place(str(folder))
        return
    if cluster is not None:
        node = nodes(case) - 1
        place = Place(str(folder), f"10.111.0.{node + 1}", _PORT)
        with _kept(place, folder, cluster.command(node, [])[3]):
            yield place
        return
    with socket.create_server(("127.0.0.1", 0)) as listener:
        place = Place(str(folder), "127.0.0.1", listener.getsockname()[1], listener)
        with _kept(place, folder, None) if case.keeper else contextlib.nullcontext():
            yield place


@contextlib.contextmanager
def _kept(place: Place, folder: Path, namespace: str | None) -> Iterator[None]:
    def work() -> int:
        keep(place)
        return 0

    keeper = _fork(-1, folder / "keeper", namespace, work)
    if place.listener is not None:
        place.listener.close()  # or workers that are forked later would hold it open
    try:
        yield
    finally:
        keeper.end()


def start(case: Case, run: Run, rank: int, place: Place, cluster: Cluster | None) -> Process:
    """A worker's process; torch is imported once."""
    folder = Path(place.folder)

    def work() -> int:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo" if cluster is None else cluster.interface
        os.environ["TMPDIR"] = tempfile.tempdir = str(folder / "scratch")
        return main(case, run, rank, place)

    namespace = None if cluster is None else cluster.command(rank, [])[3]
    return _fork(rank, folder / f"stderr{rank}", namespace, work)


def _fork(rank: int, said: Path, namespace: str | None, work: Callable[[], int]) -> Process:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return Process(rank, pid)
    status = 1
    try:
        os.setpgid(0, 0)  # the terminal's Ctrl-C reaches the soak alone
        errors = os.open(said, os.O_WRONLY | os.O_CREAT, 0o600)
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
    """Let this process live in a network namespace."""
    with open(f"/run/netns/{namespace}", "rb") as file:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"entering namespace {namespace}")
