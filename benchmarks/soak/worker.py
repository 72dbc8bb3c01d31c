"""One worker process: trains a model of constants, and writes a report."""

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
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import offbeat
from benchmarks.soak.model import RATE, Constant, gradient, spread_of
from benchmarks.soak.plan import BY_ITSELF, Case
from benchmarks.soak.records import (
    CONNECTED,
    FINISHED,
    FIRST_STEP,
    Progress,
    Report,
    Run,
)

_CONNECT_LIMIT = timedelta(seconds=30)


class UserError(Exception):
    """An exception of the user's code."""


@dataclass(frozen=True)
class Rendezvous:
    """The store at which the workers of a run find each other.

    Attributes:
        folder: Directory of the files of the run, with the store if it is a file.
        host: Address of the store's process; empty if the store is a file.
        port: Port of the store's process.
        listener: Listening socket for a store on this machine.
    """

    folder: str
    host: str = ""
    port: int = 0
    listener: socket.socket | None = None

    def store(self, *, serves: bool) -> Any:
        """Return a connection to the store; with ``serves`` the store itself."""
        if not self.host:
            return dist.FileStore(f"{self.folder}/store", -1)  # type: ignore[attr-defined]
        listener = self.listener if serves else None
        return dist.TCPStore(  # type: ignore[attr-defined]
            self.host,
            self.port,
            is_master=serves,
            master_listen_fd=None if listener is None else listener.fileno(),
            wait_for_workers=False,
            timeout=_CONNECT_LIMIT,
        )


def main(case: Case, run: Run, rank: int, rendezvous: Rendezvous) -> int:
    """Train, and write the report. Returns the exit status."""
    gc.freeze()  # so that garbage collection does not visit all imported modules
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    serves = case.own_store and rank == 0
    if rendezvous.listener is not None and not serves:
        rendezvous.listener.close()  # otherwise this worker would keep the port open
    progress = Progress(f"{rendezvous.folder}/progress")
    worker = Worker(case, run, rank, progress)
    store = rendezvous.store(serves=serves)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=case.workers, timeout=_CONNECT_LIMIT
    )
    progress.write(rank, CONNECTED)
    report = worker.report
    try:
        worker.train()
        report.outcome = "finished"
    except BaseException as error:
        report.outcome = type(error).__name__
        report.kinds = [kind.__name__ for kind in type(error).__mro__]
        report.text = str(error)
    path = Path(rendezvous.folder, f"report{rank}")
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(report)))
    partial.rename(path)
    deadline = time.monotonic() + 60
    over = Path(rendezvous.folder, "over")
    while (case.lingers or serves) and not over.exists():
        if time.monotonic() > deadline:  # a fault of the soak itself
            return 3
        time.sleep(0.005)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    return 0


class Worker:
    """Training of one worker, with the part of the fault that it injects itself."""

    def __init__(self, case: Case, run: Run, rank: int, progress: Progress) -> None:
        self.report = Report(warnings=_record_warnings())
        self._case, self._run, self._rank = case, run, rank
        self._progress = progress
        self._is_victim = run.breaks and rank == case.victim

    def train(self) -> None:
        """Attach, take all steps, detach, and fill in the report."""
        case, report = self._case, self.report
        model = Constant(case.elements)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.5)
        strategy = offbeat.parse_strategy(case.strategy)
        model(0.0).backward()  # starts autograd's thread before threads are counted
        before = _open_resources()
        if self._is_victim and case.kind == "kill before attach":
            os.kill(os.getpid(), signal.SIGKILL)
        sync: Any = None
        report.since = time.monotonic()
        try:
            sync = offbeat.attach(
                model,
                optimizer,
                strategy,
                wire=case.wire,
                non_finite=case.non_finite,
                timeout_seconds=case.timeout_seconds,
            )
            with sync:
                self._take_steps(sync, model, optimizer)
        except BaseException as error:
            report.at = report.at or time.monotonic()
            error.__traceback__ = None  # it refers to the model
            raise
        finally:
            report.left = time.monotonic()
            if sync is not None:
                self._describe(sync, model)
            sync = None
            self._count_resources(before, case.timeout_seconds + 2)

    def _take_steps(self, sync: Any, model: Constant, optimizer: torch.optim.Optimizer) -> None:
        case, run, report = self._case, self._run, self.report
        draw = random.Random(f"{case.seed} {self._rank} seconds")
        if run.loads:
            assert run.checkpoints is not None
            with self._blocking():
                self._progress.write(self._rank, FIRST_STEP - 1)
                found = offbeat.load(run.checkpoints, sync)
            report.loaded = -1 if found is None else found.step
        until = case.steps if run.until is None else run.until
        while sync.step < until:
            step = sync.step
            self._progress.write(self._rank, FIRST_STEP + step)
            time.sleep(draw.uniform(case.step_seconds / 5, case.step_seconds))
            number = gradient(case, self._rank, step)
            if self._is_victim and step == case.step and case.kind in BY_ITSELF:
                report.fault_at = time.monotonic()
                number = _inject(case, sync, number)
            with self._blocking():
                optimizer.zero_grad()
                model(number).backward()
                optimizer.step()
                if run.checkpoints is not None and sync.step % 3 == 0:
                    self._progress.write(self._rank, FIRST_STEP + sync.step)
                    offbeat.save(run.checkpoints, sync)
        self._progress.write(self._rank, FIRST_STEP + until)
        if run.until is not None:
            report.at = time.monotonic()
            return
        with self._blocking():
            sync.finish()
        report.at = time.monotonic()
        self._progress.write(self._rank, FINISHED)

    @contextlib.contextmanager
    def _blocking(self) -> Iterator[None]:
        """Record the start of a call that may block on others, and the time of its exception."""
        self.report.since = time.monotonic()
        try:
            yield
        except BaseException:
            self.report.at = time.monotonic()
            raise

    def _describe(self, sync: Any, model: Constant) -> None:
        report = self.report
        report.step = sync.step
        numbers = [p.detach().double() for p in model.parameters()]
        report.finite = all(bool(n.isfinite().all()) for n in numbers)
        report.spread = spread_of(sync) if report.finite else 0.0
        report.values = [float(n[0]).hex() for n in numbers]

    def _count_resources(self, before: tuple[int, int], seconds: float) -> None:
        """Count descriptors and threads that ``attach`` left open; wait for those that end.

        gloo may keep a thread for an operation that missed the close of its connections, until the
        operation's time-out.
        """
        report, deadline = self.report, time.monotonic() + seconds
        while True:
            now = _open_resources()
            report.descriptors, report.threads = (a - b for a, b in zip(now, before, strict=True))
            if (report.descriptors <= 0 and report.threads <= 0) or time.monotonic() > deadline:
                return
            gc.collect()
            time.sleep(0.01)


def _record_warnings() -> list[str]:
    """Return a list to which every warning of Offbeat is added."""
    lines: list[str] = []

    class Recorder(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logging.getLogger("offbeat").addHandler(Recorder(logging.WARNING))
    return lines


def _open_resources() -> tuple[int, int]:
    """Return the number of this process's file descriptors and threads."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def _inject(case: Case, sync: Any, number: float) -> float:
    """Inject the fault of a worker into itself; return the gradient of this step."""
    if case.kind == "exception":
        raise UserError("of the user's own")
    if case.kind == "detach":
        sync.detach()
        raise UserError("after detach()")
    if case.kind == "slow":
        time.sleep(1.0)
    return math.nan if case.kind == "not finite" else number
