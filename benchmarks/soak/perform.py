"""Runs workers, breaks one of them, and gathers what is left of all."""

import contextlib
import json
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.soak.faults import BREAKS, undo
from benchmarks.soak.plan import Case
from benchmarks.soak.processes import Process, Scene, meeting_place, nodes, start
from benchmarks.soak.worker import CONNECTED, Progress, Report, Run
from offbeat.lab.launch.cluster import Cluster

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
        left: What has been left behind.
        reached: How far each worker has come; see ``Progress``.
        said: Last lines of the standard errors, of those that hung or failed to start.
    """

    run: Run
    reports: list[Report | None] = field(default_factory=list)
    fault_at: float | None = None
    hung: list[int] = field(default_factory=list)
    statuses: list[int | None] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    reached: list[int] = field(default_factory=list)
    said: str = ""


def perform(case: Case, run: Run, folder: Path) -> Outcome:
    """Run all workers once; with ``run.breaks`` the fault happens.

    Raises:
        StartError: not even without a fault.
    """
    folder.mkdir()
    outcome = Outcome(run)
    cluster = Cluster(nodes(case), case.shaped_bits) if case.shaped_bits else None
    with cluster or contextlib.nullcontext(), meeting_place(case, folder, cluster) as place:
        progress = Progress(str(folder / "progress"))
        with contextlib.closing(progress):
            scene = Scene(case, run, folder, progress, [], cluster)
            (folder / "scratch").mkdir()
            ranks = range(case.workers + (case.newcomers if run.breaks else 0))
            try:
                for rank in ranks:
                    scene.processes.append(start(case, run, rank, place, cluster))
                _watch(scene, outcome)
            finally:
                _end(scene, outcome)
    _gather(scene, outcome)
    if cluster is not None:
        shown = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
        own = f"{cluster.command(0, [])[3].rpartition('-')[0]}-"
        outcome.left += [one for one in shown.stdout.split() if one.startswith(own)]
    return outcome


def _watch(scene: Scene, outcome: Outcome) -> None:
    """Until all have ended, or the time is over."""
    case = scene.case
    _await_start(scene)
    deadline = time.monotonic() + case.timeout_seconds + HANG_SECONDS
    if scene.run.breaks:
        fault = BREAKS.get(case.kind)
        outcome.fault_at = None if fault is None else fault(scene)
    ranks = {process.rank for process in scene.processes}
    _await_reports(scene, ranks - {case.silent} if scene.run.breaks else ranks, deadline)
    if case.silent >= 0 and scene.run.breaks:
        undo(scene)  # the one that was stopped must learn it, too
        _await_reports(scene, ranks, deadline)
    Path(scene.folder, "over").touch()
    while time.monotonic() < deadline and not all(p.poll() for p in scene.processes):
        time.sleep(0.005)


def _await_start(scene: Scene) -> None:
    progress, processes = scene.progress, scene.processes
    deadline = time.monotonic() + _START_SECONDS
    while any(progress.read(p.rank) < CONNECTED for p in processes):
        if time.monotonic() > deadline or any(p.poll() for p in processes):
            ended = [p.rank for p in processes if p.poll()]
            if all(progress.read(rank) >= CONNECTED for rank in ended) and (
                time.monotonic() < deadline
            ):
                time.sleep(0.002)  # one that has got further, and ended already
                continue
            raise StartError(f"the workers of {scene.case.name} were not connected")
        time.sleep(0.002)


def _await_reports(scene: Scene, ranks: set[int], deadline: float) -> None:
    """Wait until these have reported or ended."""
    while time.monotonic() < deadline and not all(scene.reported(rank) for rank in ranks):
        time.sleep(0.005)


def _end(scene: Scene, outcome: Outcome) -> None:
    """Nobody lives on; who should not have lived so long shows where it is."""
    processes: list[Process] = scene.processes
    outcome.hung = [p.rank for p in processes if not p.poll()]
    for process in processes:
        if process.rank in outcome.hung:
            process.send(signal.SIGCONT)
            process.send(signal.SIGABRT)  # faulthandler shows where
            time.sleep(0.3)
        process.end()
    outcome.statuses = [p.status for p in processes]
    outcome.reached = [scene.progress.read(p.rank) for p in processes]


def _gather(scene: Scene, outcome: Outcome) -> None:
    folder = scene.folder
    for process in scene.processes:
        path = folder / f"report{process.rank}"
        outcome.reports.append(Report(**json.loads(path.read_text())) if path.exists() else None)
    for report in outcome.reports:
        if report is not None and report.fault_at is not None:
            outcome.fault_at = report.fault_at
    outcome.left += [f"temporary {one.name}" for one in (folder / "scratch").iterdir()]
    bad = [r for r, s in enumerate(outcome.statuses) if r in outcome.hung or s not in (0, -9)]
    outcome.said = "\n".join(_tail(folder / f"stderr{rank}") for rank in bad)


def _tail(path: Path) -> str:
    return path.read_text(errors="replace")[-3000:] if path.exists() else ""


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
