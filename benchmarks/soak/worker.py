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
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import offbeat
from benchmarks.soak.plan import BY_ITSELF, STEPS, Case
from offbeat.strategies.base import Strategy

CONNECTED, ATTACHED = 1, 2  # what a worker has reached before its first step
FIRST_STEP = 10
FINISHED = FIRST_STEP + STEPS + 1
_WORD = struct.Struct("q")


@dataclass(frozen=True)
class Run:
    """What the workers do; one fault may take several runs.

    Attributes:
        name: Of its files.
        checkpoints: Directory of the checkpoints; None: none are saved.
        loads: Whether it goes on from them.
        breaks: Whether the fault happens in it.
        until: The step after which all leave.
    """

    name: str
    checkpoints: str | None = None
    loads: bool = False
    breaks: bool = True
    until: int = STEPS


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
    descriptors: int = 0
    threads: int = 0


class Progress:
    """How far each worker is, in a file that all of them see."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def write(self, rank: int, value: int) -> None:
        """Worker ``rank`` has come to ``value``."""
        os.pwrite(self._file, _WORD.pack(value), _WORD.size * rank)

    def read(self, rank: int) -> int:
        """How far it is."""
        found = os.pread(self._file, _WORD.size, _WORD.size * rank)
        return int(_WORD.unpack(found)[0]) if len(found) == _WORD.size else 0

    def close(self) -> None:
        """Give the file back."""
        os.close(self._file)


class Constant(nn.Module):
    """All numbers are the same, and so are their gradients: in two dtypes, so two buckets."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        # One bucket is there long before the other: time enough for a fault between them.
        sizes = {"a": (elements // 20, torch.float32), "b": (7, torch.float64)}
        sizes |= {"c": (elements, torch.float64), "d": (5, torch.float32)}
        for name, (size, dtype) in sizes.items():
            setattr(self, name, nn.Parameter(torch.full((size,), 1.0, dtype=dtype)))

    def forward(self, gradient: float) -> Tensor:
        """A loss with this gradient everywhere."""
        return sum(p.double().sum() for p in self.parameters()) * gradient


def regions(sync: Any) -> list[list[Tensor]]:
    """Tensors whose numbers are all the same at any time, because they are exchanged together."""
    state = sync._worker.state
    for name in ("parts", "fragments"):
        if flights := getattr(state, name, None):
            return [
                [t for b in flight.buckets[: flight.parameter_buckets] for t in b.tensors]
                for flight in flights
            ]
    server = getattr(state, "server", None)
    tensors = [p.detach() for _, p in sync._worker.replica.parameters]
    if server is None:
        return [tensors]
    pieces: list[list[Tensor]] = [[] for _ in server._places]
    start = 0
    for tensor in tensors:
        for i, place in enumerate(server._places):
            low, high = max(place.start, start), min(place.stop, start + tensor.numel())
            if low < high:
                pieces[i].append(tensor[low - start : high - start])
        start += tensor.numel()
    return pieces


def spread_of(sync: Any) -> float:
    """How far numbers are apart that must be equal, relative to their size."""
    found = 0.0
    for tensors in regions(sync):
        if not tensors:
            continue
        low = min(float(t.detach().min()) for t in tensors)
        high = max(float(t.detach().max()) for t in tensors)
        found = max(found, (high - low) / (1 + abs(high)))
    return found


def gradient(case: Case, rank: int, step: int) -> float:
    """Of this worker in this step: very different from the others', and exact in binary."""
    draw = random.Random(f"{case.seed} {rank} {step}")
    return draw.choice((-1, 1)) * (1 + draw.randrange(64) / 64) * 2.0**rank


class Broken(Exception):  # noqa: N818 - the user's own
    """The exception of the user's code."""


def join(case: Case, rank: int, folder: str, listener: Any) -> None:
    """Open the default process group."""
    limit = timedelta(seconds=30)
    if case.own_store:
        store: Any = dist.TCPStore(
            "127.0.0.1",
            listener.getsockname()[1],
            is_master=rank == 0,
            master_listen_fd=listener.fileno() if rank == 0 else None,
            wait_for_workers=False,
            timeout=limit,
        )
    else:
        store = dist.FileStore(f"{folder}/store", -1)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=case.workers, timeout=limit)


def main(case: Case, run: Run, rank: int, folder: str, listener: Any) -> int:
    """Train, and write the report. Returns the exit status."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    report, lines = Report(), _keep_warnings()
    progress = Progress(f"{folder}/progress")
    join(case, rank, folder, listener)
    progress.write(rank, CONNECTED)
    try:
        _train(case, run, rank, report, progress)
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


def _train(case: Case, run: Run, rank: int, report: Report, progress: Progress) -> None:
    victim = run.breaks and rank == case.victim
    model = Constant(case.elements)
    optimizer = torch.optim.SGD(model.parameters(), lr=1 / 64, momentum=0.5)
    strategy = offbeat.parse_strategy(case.strategy)
    model(0.0).backward()  # starts autograd's thread
    before = _held()
    if victim and case.kind == "kill before attach":
        os.kill(os.getpid(), signal.SIGKILL)
    report.since = time.monotonic()
    sync = None
    try:
        sync = offbeat.attach(
            model,
            optimizer,
            strategy,
            wire=case.wire,
            non_finite=non_finite_of(case, strategy),
            timeout_seconds=case.timeout_seconds,
        )
        progress.write(rank, ATTACHED)
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
        del sync
        _settle(report, before, case.timeout_seconds + 2)


def non_finite_of(case: Case, strategy: Strategy) -> Any:
    """What the case asks for, if this strategy can do it."""
    return case.non_finite if case.non_finite in strategy.non_finite else "warn"


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
    while sync.step < run.until:
        step = sync.step
        progress.write(rank, FIRST_STEP + step)
        time.sleep(draw.uniform(0.002, 0.01))
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
    progress.write(rank, FIRST_STEP + run.until)
    if run.until < STEPS:
        report.at = time.monotonic()
        return
    with _waiting(report):
        sync.finish()
    report.at = time.monotonic()
    progress.write(rank, FINISHED)


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
