"""One worker: trains a model of constants, and writes down what it has seen."""

import atexit
import contextlib
import gc
import json
import logging
import math
import os
import random
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import offbeat
from benchmarks.soak.model import RATE, Constant, gradient, spread_of
from benchmarks.soak.plan import BY_ITSELF, Case

CONNECTED, ASKING = 1, 2  # what a worker has reached before its first step
FIRST_STEP = 10
FINISHED = 1000
_WORD = struct.Struct("q")


@dataclass(frozen=True)
class Run:
    """What the workers do; one fault may take several runs.

    Attributes:
        name: Of its files.
        checkpoints: Directory of the checkpoints; None: none are saved.
        loads: Whether it goes on from them.
        breaks: Whether the fault happens in it.
        until: The step after which all leave; None: they finish after the last.
    """

    name: str
    checkpoints: str | None = None
    loads: bool = False
    breaks: bool = True
    until: int | None = None


@dataclass
class Report:
    """What one worker has seen.

    Attributes:
        outcome: "finished", or the class of what ended it.
        kinds: Names of the error's classes, the first is its own.
        text: Of the error.
        at: When its error came out, or it finished, by the machine's monotonic clock.
        left: When it had detached.
        since: When its last call of anything that may wait for others began.
        fault_at: When the fault happened, if this worker knows.
        step: Own steps.
        loaded: The step from which it went on; −1: none.
        spread: How far numbers are apart that must be equal, relative to their size; a mean that
            was taken by halves shows here.
        finite: Whether all parameters are finite.
        values: The first number of each tensor, in hexadecimal.
        warnings: What was logged.
        begun: Own steps when ``attach`` returned.
        view: Number of the last view.
        members: Of the last view.
        changes: View changes of which it knows.
        entered: Views as they were first seen after a step: number, members, the time, and when
            the call began that came back in it.
        shares: Sum over its steps of one part of as many workers as there were.
        descriptors: How many more there are than before ``attach``.
        threads: Likewise.
    """

    outcome: str = ""
    kinds: list[str] = field(default_factory=list)
    text: str = ""
    at: float = 0.0
    left: float = 0.0
    since: float = 0.0
    fault_at: float | None = None
    step: int = 0
    loaded: int = -1
    spread: float = 0.0
    finite: bool = True
    values: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    begun: int = 0
    view: int = 0
    members: list[int] = field(default_factory=list)
    changes: int = 0
    entered: list[tuple[int, list[int], float, float]] = field(default_factory=list)
    shares: float = 0.0
    descriptors: int = 0
    threads: int = 0


class Progress:
    """How far each worker is, in a file that all of them see: its step, and whom it trains with."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def write(self, rank: int, value: int) -> None:
        """Worker ``rank`` has come to ``value``."""
        os.pwrite(self._file, _WORD.pack(value), 2 * _WORD.size * rank)

    def enter(self, rank: int, members: Iterable[int]) -> None:
        """Worker ``rank`` trains with these."""
        mask = sum(1 << member for member in members)
        os.pwrite(self._file, _WORD.pack(mask), 2 * _WORD.size * rank + _WORD.size)

    def read(self, rank: int) -> int:
        """How far it is."""
        return self._read(2 * _WORD.size * rank)

    def sees(self, rank: int, other: int) -> bool:
        """Whether it trains with another one, as far as it has said."""
        mask = self._read(2 * _WORD.size * rank + _WORD.size)
        return not mask or bool(mask >> other & 1)

    def _read(self, place: int) -> int:
        found = os.pread(self._file, _WORD.size, place)
        return int(_WORD.unpack(found)[0]) if len(found) == _WORD.size else 0

    def close(self) -> None:
        """Give the file back."""
        os.close(self._file)


class Broken(Exception):  # noqa: N818 - the user's own
    """The exception of the user's code."""


@dataclass(frozen=True)
class Place:
    """Where the workers meet: a store in a process, or else in a file.

    Attributes:
        folder: Of the files of a run.
        host: Of the process.
        port: Likewise.
        listener: Its socket, where a worker of this machine is to keep the store.
    """

    folder: str
    host: str = ""
    port: int = 0
    listener: socket.socket | None = None

    @property
    def address(self) -> str:
        """As ``offbeat.join`` takes it."""
        return f"{self.host}:{self.port}" if self.host else f"file://{self.folder}/store"

    def store(self, *, keeps: bool) -> Any:
        """A connection to it, or the store itself."""
        limit = timedelta(seconds=30)
        if not self.host:
            return dist.FileStore(f"{self.folder}/store", -1)  # type: ignore[attr-defined]
        listener = self.listener if keeps else None
        return dist.TCPStore(  # type: ignore[attr-defined]
            self.host,
            self.port,
            is_master=keeps,
            master_listen_fd=None if listener is None else listener.fileno(),
            wait_for_workers=False,
            timeout=limit,
        )


def keep(place: Place) -> None:
    """Keep the store, in a process that does nothing else, until it is killed."""
    kept = place.store(keeps=True)
    deadline = time.monotonic() + 180  # should nobody be left to do that
    while kept is not None and time.monotonic() < deadline:
        time.sleep(1)


def _connect(case: Case, rank: int, place: Place) -> None:
    """Open the default process group."""
    limit = timedelta(seconds=30)
    store = place.store(keeps=case.own_store and rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=case.workers, timeout=limit)


def main(case: Case, run: Run, rank: int, place: Place) -> int:
    """Train, and write the report. Returns the exit status."""
    folder = place.folder
    gc.freeze()  # else each look for garbage goes through all that was imported
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if place.listener is not None and not (case.own_store and rank == 0):
        place.listener.close()  # or this worker would seem to keep the store
    report, lines = Report(), _keep_warnings()
    progress = Progress(f"{folder}/progress")
    if rank < case.workers:
        _connect(case, rank, place)
    progress.write(rank, CONNECTED)
    try:
        _train(case, run, rank, place, report, progress)
        report.outcome = "finished"
    except BaseException as error:
        report.outcome = type(error).__name__
        report.kinds = [kind.__name__ for kind in type(error).__mro__]
        report.text = str(error)
    report.warnings = lines
    path = Path(folder, f"report{rank}")
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(report)))
    partial.rename(path)
    deadline = time.monotonic() + 60
    over = Path(folder, "over")
    while (case.lingers or (rank == 0 and case.own_store)) and not over.exists():
        if time.monotonic() > deadline:  # of the soak's own making
            return 3
        time.sleep(0.005)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    return 0


def _keep_warnings() -> list[str]:
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logging.getLogger("offbeat").addHandler(Keep(logging.WARNING))
    return lines


def _held() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def _train(
    case: Case, run: Run, rank: int, place: Place, report: Report, progress: Progress
) -> None:
    victim = run.breaks and rank == case.victim
    model = Constant(case.elements, counts=case.counts)
    momentum = 0.0 if case.continues else 0.5  # so that all steps count alike
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=momentum)
    strategy = offbeat.parse_strategy(case.strategy)
    model(0.0).backward()  # starts autograd's thread
    before = _held()
    if victim and case.kind == "kill before attach":
        os.kill(os.getpid(), signal.SIGKILL)
    sync: Any = None

    def share(*_: object) -> None:
        report.shares += 1 / sync.size

    optimizer.register_step_post_hook(share)  # before attach's, which may begin another view
    group = _asked(rank, place, progress) if rank >= case.workers else None
    report.since = time.monotonic()
    try:
        sync = offbeat.attach(
            model,
            optimizer,
            strategy,
            group=group,
            wire=case.wire,
            non_finite=case.non_finite,
            min_workers=case.min_workers if case.continues else None,
            timeout_seconds=case.timeout_seconds,
        )
        report.begun = sync.step
        with sync:
            _steps(case, run, rank, sync, model, optimizer, report, progress)
    except BaseException as error:
        report.at = report.at or time.monotonic()
        error.__traceback__ = None  # it holds the model
        raise
    finally:
        report.left = time.monotonic()
        if sync is not None:
            report.step = sync.step
            numbers = [p.detach().double() for p in model.parameters()]
            report.finite = all(bool(n.isfinite().all()) for n in numbers)
            report.spread = spread_of(sync) if report.finite else 0.0
            report.values = [float(n[0]).hex() for n in numbers]
            details = sync.stats.details
            report.view, report.members = details.get("view", 0), details.get("members", [])
            report.changes = details.get("view_changes", 0)
        sync = None
        _settle(report, before, case.timeout_seconds + 2)


def _asked(rank: int, place: Place, progress: Progress) -> Any:
    """What a newcomer attaches to, as soon as it is to come."""
    deadline = time.monotonic() + 60
    while not Path(place.folder, "come").exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    progress.write(rank, ASKING)
    return offbeat.join(place.address)


def _settle(report: Report, before: tuple[int, int], seconds: float) -> None:
    """Count what ``attach`` has left open.

    gloo may leave a thread to an operation that has missed the end of its connections: it ends with
    the time-out of that.
    """
    deadline = time.monotonic() + seconds
    while True:
        now = _held()
        report.descriptors, report.threads = (a - b for a, b in zip(now, before, strict=True))
        if (report.descriptors <= 0 and report.threads <= 0) or time.monotonic() > deadline:
            return
        gc.collect()
        time.sleep(0.01)


def _steps(
    case: Case,
    run: Run,
    rank: int,
    sync: Any,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    report: Report,
    progress: Progress,
) -> None:
    victim = run.breaks and rank == case.victim
    draw = random.Random(f"{case.seed} {rank} seconds")
    if run.loads:
        assert run.checkpoints is not None
        with _waiting(report):
            progress.write(rank, FIRST_STEP - 1)
            found = offbeat.load(run.checkpoints, sync)
        report.loaded = -1 if found is None else found.step
    until = case.steps if run.until is None else run.until
    while sync.step < until:
        step = sync.step
        progress.write(rank, FIRST_STEP + step)
        time.sleep(draw.uniform(case.step_seconds / 5, case.step_seconds))
        number = gradient(case, rank, step)
        if victim and step == case.step and case.kind in BY_ITSELF:
            report.fault_at = time.monotonic()
            number = _break(case, sync, number)
        with _waiting(report):
            optimizer.zero_grad()
            model(number).backward()
            optimizer.step()
            if run.checkpoints is not None and sync.step % 3 == 0:
                progress.write(rank, FIRST_STEP + sync.step)
                offbeat.save(run.checkpoints, sync)
        _look(sync, rank, report, progress)
    progress.write(rank, FIRST_STEP + until)
    if run.until is not None:
        report.at = time.monotonic()
        return
    with _waiting(report):
        sync.finish()
    report.at = time.monotonic()
    progress.write(rank, FINISHED)


def _look(sync: Any, rank: int, report: Report, progress: Progress) -> None:
    """At who is there."""
    details = sync.stats.details
    view = details.get("view", 0)
    if view != (report.entered[-1][0] if report.entered else 0):
        now = time.monotonic()
        report.entered.append((view, list(details["members"]), now, report.since))
        progress.enter(rank, details["members"])


@contextlib.contextmanager
def _waiting(report: Report) -> Iterator[None]:
    report.since = time.monotonic()
    try:
        yield
    except BaseException:
        report.at = time.monotonic()
        raise


def _break(case: Case, sync: Any, number: float) -> float:
    """What a worker does to itself; the gradient of this step."""
    if case.kind == "exception":
        raise Broken("of the user's own")
    if case.kind == "detach":
        sync.detach()
        raise Broken("after detach()")
    if case.kind == "slow":
        time.sleep(1.0)
    return math.nan if case.kind == "not finite" else number
