"""Runs workers, breaks one of them, and gathers what is left of all."""

import contextlib
import ctypes
import faulthandler
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.soak.plan import Case
from benchmarks.soak.worker import (
    CONNECTED,
    FINISHED,
    FIRST_STEP,
    Progress,
    Report,
    Run,
    main,
)
from offbeat.lab.cluster import Cluster

# torch asks for the name of every connection, and a name server that is out of reach keeps it
# waiting for 5 s: nobody is asked.
os.environ["RES_OPTIONS"] = "attempts:0"
_CLONE_NEWNET = 0x40000000
_START_SECONDS = 30.0
HANG_SECONDS = 30.0
"""Beyond the time-out: how long a run may take."""


class StartError(Exception):
    """The workers were not connected: gloo's own start fails now and then on a busy machine."""


@dataclass
class Outcome:
    """What is left of one run.

    Attributes:
        run: It.
        reports: Of the workers; None of one that died.
        fault_at: When the fault happened, by the monotonic clock; None: it did not.
        hung: Ranks that had not ended in time.
        statuses: How the processes ended, as by ``os.waitstatus_to_exitcode``.
        reached: How far the victim has come; see ``Progress``.
        left: What has been left behind.
        said: Last lines of the standard errors, of those that hung or failed to start.
    """

    run: Run
    reports: list[Report | None] = field(default_factory=list)
    fault_at: float | None = None
    hung: list[int] = field(default_factory=list)
    statuses: list[int | None] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    reached: int = 0
    said: str = ""


@dataclass
class _Process:
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
        if not self.poll():
            os.kill(self.pid, number)


def perform(case: Case, run: Run, folder: Path) -> Outcome:
    """Run all workers once; with ``run.breaks`` the fault happens.

    Raises:
        StartError: not even without a fault.
    """
    folder.mkdir()
    outcome = Outcome(run)
    cluster = Cluster(case.workers, case.shaped_bits) if case.shaped_bits else None
    with cluster or contextlib.nullcontext():
        _perform(case, run, folder, cluster, outcome)
    if cluster is not None:
        shown = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
        own = f"offbeat-{os.getpid()}-"
        outcome.left += [one for one in shown.stdout.split() if one.startswith(own)]
    return outcome


def _perform(case: Case, run: Run, folder: Path, cluster: Cluster | None, outcome: Outcome) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    progress = Progress(str(folder / "progress"))
    scratch = folder / "scratch"
    scratch.mkdir()
    processes: list[_Process] = []
    with listener, contextlib.closing(progress):
        try:
            processes.extend(
                _fork(case, run, rank, folder, listener, cluster) for rank in range(case.workers)
            )
            _await_start(case, progress, processes)
            deadline = time.monotonic() + case.timeout_seconds + HANG_SECONDS
            if run.breaks:
                outcome.fault_at = _BREAKS.get(case.kind, _nothing)(
                    case, run, progress, processes, cluster
                )
            _await_reports(case, folder, processes, deadline)
            if case.kind in ("stop", "unplug") and run.breaks:
                _undo(case, processes, cluster)  # the one that was stopped must learn it, too
                _await_reports(case, folder, processes, deadline, everyone=True)
            Path(folder, "over").touch()
            while time.monotonic() < deadline and not all(p.poll() for p in processes):
                time.sleep(0.005)
        finally:
            outcome.hung = [p.rank for p in processes if not p.poll()]
            for process in processes:
                if process.rank in outcome.hung:
                    process.send(signal.SIGCONT)
                    process.send(signal.SIGABRT)  # faulthandler shows where
                    time.sleep(0.3)
                    process.send(signal.SIGKILL)
            for process in processes:
                while not process.poll():
                    time.sleep(0.005)
            reached = progress.read(case.victim)
    outcome.statuses = [p.status for p in processes]
    outcome.reached = reached
    for rank in range(case.workers):
        path = folder / f"report{rank}"
        outcome.reports.append(Report(**json.loads(path.read_text())) if path.exists() else None)
    for report in outcome.reports:
        if report is not None and report.fault_at is not None:
            outcome.fault_at = report.fault_at
    outcome.left += [f"temporary {one.name}" for one in scratch.iterdir()]
    bad = [r for r, s in enumerate(outcome.statuses) if r in outcome.hung or s not in (0, -9)]
    outcome.said = "\n".join(_tail(folder / f"stderr{rank}") for rank in bad)


def _tail(path: Path) -> str:
    return path.read_text(errors="replace")[-3000:] if path.exists() else ""


def _fork(
    case: Case, run: Run, rank: int, folder: Path, listener: socket.socket, cluster: Cluster | None
) -> _Process:
    """A worker's process; torch is imported once."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return _Process(rank, pid)
    status = 1
    try:
        os.setpgid(0, 0)  # the terminal's Ctrl-C reaches the soak alone
        errors = os.open(folder / f"stderr{rank}", os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(errors, 2)
        faulthandler.enable(all_threads=True)
        if cluster is not None:
            _enter(cluster.command(rank, [])[3])
        os.environ["GLOO_SOCKET_IFNAME"] = "lo" if cluster is None else cluster.interface
        os.environ["TMPDIR"] = tempfile.tempdir = str(folder / "scratch")
        status = main(case, run, rank, str(folder), listener)
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


def _await_start(case: Case, progress: Progress, processes: list[_Process]) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while any(progress.read(p.rank) < CONNECTED for p in processes):
        if time.monotonic() > deadline or any(p.poll() for p in processes):
            ended = [p.rank for p in processes if p.poll()]
            if all(progress.read(rank) >= CONNECTED for rank in ended) and (
                time.monotonic() < deadline
            ):
                time.sleep(0.002)  # one that has got further, and ended already
                continue
            raise StartError(f"the workers of {case.name} were not connected")
        time.sleep(0.002)


def _await_reports(
    case: Case,
    folder: Path,
    processes: list[_Process],
    deadline: float,
    *,
    everyone: bool = False,
) -> None:
    """Wait until all have reported or ended; unless ``everyone``, of a stopped one not."""
    stopped = case.kind in ("stop", "unplug") and not everyone
    waited = [p for p in processes if not (stopped and p.rank == case.victim)]
    while time.monotonic() < deadline:
        if all(p.poll() or (folder / f"report{p.rank}").exists() for p in waited):
            return
        time.sleep(0.005)


# -- faults ----------------------------------------------------------------------------------------

_Break = Callable[[Case, Run, Progress, list[_Process], Cluster | None], float | None]


def _nothing(
    case: Case, run: Run, progress: Progress, processes: list[_Process], cluster: Cluster | None
) -> float | None:
    """The worker does it to itself."""
    return None


def _until(case: Case, progress: Progress, processes: list[_Process], value: int) -> bool:
    """Wait until the victim has come to ``value``, and the delay more; whether it lives."""
    victim = processes[case.victim]
    deadline = time.monotonic() + _START_SECONDS
    while progress.read(case.victim) < value:
        if victim.poll() or time.monotonic() > deadline:
            return False
        time.sleep(0.0005)
    time.sleep(case.delay_seconds)
    return not victim.poll() and progress.read(case.victim) < FINISHED


def _signals(*numbers: int, everyone: bool = False) -> _Break:
    """Signals to the victim, some way into its step."""

    def send(
        case: Case, run: Run, progress: Progress, processes: list[_Process], cluster: Any
    ) -> float | None:
        value = FIRST_STEP + case.step
        if case.kind == "kill in load":
            value = FIRST_STEP - 1
        elif "in save" in case.kind:
            value = FIRST_STEP + 3 * (1 + case.step // 3)  # while it saves
        if not _until(case, progress, processes, value):
            return None
        at = time.monotonic()
        for process in processes if everyone else [processes[case.victim]]:
            process.send(numbers[0])
        if len(numbers) > 1:
            time.sleep(1.0)
            processes[case.victim].send(numbers[1])
        return at

    return send


def _unplug(
    case: Case,
    run: Run,
    progress: Progress,
    processes: list[_Process],
    cluster: Cluster | None,
) -> float | None:
    """The victim's link ends without a word."""
    assert cluster is not None
    if not _until(case, progress, processes, FIRST_STEP + case.step):
        return None
    at = time.monotonic()
    _link(cluster, case.victim, "down")
    return at


def _link(cluster: Cluster, rank: int, state: str) -> None:
    namespace = cluster.command(rank, [])[3]
    argv = ["ip", "-n", namespace, "link", "set", cluster.interface, state]
    subprocess.run(argv, check=True, timeout=30)


def _undo(case: Case, processes: list[_Process], cluster: Cluster | None) -> None:
    if case.kind == "stop":
        processes[case.victim].send(signal.SIGCONT)


def _before_attach(
    case: Case, run: Run, progress: Progress, processes: list[_Process], cluster: Cluster | None
) -> float | None:
    """When the others have come to attach."""
    victim = processes[case.victim]
    deadline = time.monotonic() + _START_SECONDS
    while not victim.poll() and time.monotonic() < deadline:
        time.sleep(0.001)
    return time.monotonic()


_BREAKS: dict[str, _Break] = {
    "kill": _signals(signal.SIGKILL),
    "terminate": _signals(signal.SIGTERM),
    "kill server": _signals(signal.SIGKILL),
    "kill in save": _signals(signal.SIGKILL),
    "kill all in save": _signals(signal.SIGKILL, everyone=True),
    "kill in load": _signals(signal.SIGKILL),
    "stop": _signals(signal.SIGSTOP),
    "pause": _signals(signal.SIGSTOP, signal.SIGCONT),
    "interrupt": _signals(signal.SIGINT),
    "unplug": _unplug,
    "kill before attach": _before_attach,
}


@contextlib.contextmanager
def working_folder() -> Iterator[Path]:
    """One that is gone afterwards.

    No ``TemporaryDirectory``, which the exit of every forked worker would remove.
    """
    folder = tempfile.mkdtemp(prefix="soak-")
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
