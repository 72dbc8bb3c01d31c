"""Runs the workers of one case, injects the fault, and collects the reports."""

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

from benchmarks.soak.faults import FAULTS, undo
from benchmarks.soak.plan import Case
from benchmarks.soak.processes import Scene, rendezvous, start
from benchmarks.soak.records import CONNECTED, Progress, Report, Run
from offbeat_lab.launch.cluster import Cluster

_START_SECONDS = 30.0
HANG_SECONDS = 30.0
"""Time limit of a run beyond its time-out."""


class StartError(Exception):
    """The workers did not connect; gloo's own start fails now and then on a busy machine."""


@dataclass
class Outcome:
    """Outcome of one run.

    Attributes:
        run: Instructions of the workers.
        reports: Reports of the workers; None for a worker without one.
        fault_at: Monotonic time of the fault; None if it was not injected.
        hung: Ranks that had not ended at the time limit.
        statuses: Exit statuses, as of ``os.waitstatus_to_exitcode``.
        left: Names of temporary files and network namespaces that were left behind.
        reached: Last progress of each worker; see ``Progress``.
        said: Ends of the standard errors of workers that hung or failed.
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
    """Run all workers once, with the fault if ``run.breaks``.

    Raises:
        StartError: The workers did not connect.
    """
    folder.mkdir()
    outcome = Outcome(run)
    cluster = Cluster(case.workers, case.shaped_bits) if case.shaped_bits else None
    with (
        cluster or contextlib.nullcontext(),
        rendezvous(case, folder) as place,
        contextlib.closing(Progress(str(folder / "progress"))) as progress,
    ):
        scene = Scene(case, run, folder, progress, [], cluster)
        (folder / "scratch").mkdir()
        try:
            for rank in range(case.workers):
                scene.processes.append(start(case, run, rank, place, cluster))
            _watch(scene, outcome)
        finally:
            _end(scene, outcome)
    _collect(scene, outcome)
    if cluster is not None:
        shown = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
        own = f"{cluster.command(0, [])[3].rpartition('-')[0]}-"
        outcome.left += [one for one in shown.stdout.split() if one.startswith(own)]
    return outcome


def _watch(scene: Scene, outcome: Outcome) -> None:
    """Inject the fault, and wait until all workers have ended or the time limit."""
    case = scene.case
    _wait_for_start(scene)
    deadline = time.monotonic() + case.timeout_seconds + HANG_SECONDS
    if scene.run.breaks:
        fault = FAULTS.get(case.kind)
        outcome.fault_at = None if fault is None else fault(scene)
    ranks = {process.rank for process in scene.processes}
    _wait_for_reports(scene, ranks - {case.silent} if scene.run.breaks else ranks, deadline)
    if case.silent >= 0 and scene.run.breaks:
        undo(scene)  # a stopped worker must find out what happened, too
        _wait_for_reports(scene, ranks, deadline)
    Path(scene.folder, "over").touch()
    while time.monotonic() < deadline and not all(p.poll() for p in scene.processes):
        time.sleep(0.005)


def _wait_for_start(scene: Scene) -> None:
    progress, processes = scene.progress, scene.processes
    deadline = time.monotonic() + _START_SECONDS
    while any(progress.read(p.rank) < CONNECTED for p in processes):
        # A worker that connected and ended already is no failure of the start.
        failed = any(p.poll() and progress.read(p.rank) < CONNECTED for p in processes)
        if failed or time.monotonic() > deadline:
            raise StartError(f"the workers of {scene.case.name} were not connected")
        time.sleep(0.002)


def _wait_for_reports(scene: Scene, ranks: set[int], deadline: float) -> None:
    while time.monotonic() < deadline and not all(scene.reported(rank) for rank in ranks):
        time.sleep(0.005)


def _end(scene: Scene, outcome: Outcome) -> None:
    """Kill all processes; those that hang first write their stacks to standard error."""
    processes = scene.processes
    outcome.hung = [p.rank for p in processes if not p.poll()]
    for process in processes:
        if process.rank in outcome.hung:
            process.send(signal.SIGCONT)
            process.send(signal.SIGABRT)  # faulthandler writes the stacks
            time.sleep(0.3)
        process.end()
    outcome.statuses = [p.status for p in processes]
    outcome.reached = [scene.progress.read(p.rank) for p in processes]


def _collect(scene: Scene, outcome: Outcome) -> None:
    folder = scene.folder
    for process in scene.processes:
        path = folder / f"report{process.rank}"
        outcome.reports.append(Report(**json.loads(path.read_text())) if path.exists() else None)
    for report in outcome.reports:
        if report is not None and report.fault_at is not None:
            outcome.fault_at = report.fault_at
    outcome.left += [f"temporary {one.name}" for one in (folder / "scratch").iterdir()]
    bad = [r for r, s in enumerate(outcome.statuses) if r in outcome.hung or s not in (0, -9)]
    paths = [path for rank in bad if (path := folder / f"stderr{rank}").exists()]
    outcome.said = "\n".join(path.read_text(errors="replace")[-3000:] for path in paths)


@contextlib.contextmanager
def working_folder() -> Iterator[Path]:
    """Yield a temporary directory.

    It is no ``TemporaryDirectory``, which the exit of every forked worker would remove.
    """
    folder = tempfile.mkdtemp(prefix="soak-")
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
