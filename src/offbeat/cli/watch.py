"""Implementation of the command ``watch``: shows trainings by the files of their records."""

import contextlib
import glob
import itertools
import json
import math
import os
import re
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.live import Live

from offbeat.cli.progress import show_duration, show_time_left
from offbeat.cli.view import console, print_table, rendered
from offbeat.display.table import Table
from offbeat_lab.probe.tables import show_rate

_LOOK_SECONDS = 1.0  # between two looks at the files
_PRINT_SECONDS = 10.0  # between two tables, if the output is not a terminal
_RATE_SECONDS = 30.0  # training time over which rates and shares are averaged
_TREND_STEPS = 10_000
_BLOCKS = "▁▂▃▄▅▆▇█"


def watch(records: Path, once: bool) -> None:
    """Show the training whose workers write ``records``, until it has finished or Ctrl-C."""
    training = Training(records)
    if once:
        if not training.workers:
            raise ValueError(f"{records} holds no records of a training yet")
        print_table(training.table())
        return
    with contextlib.suppress(KeyboardInterrupt), contextlib.ExitStack() as stack:
        live = None
        if console.is_terminal:
            live = stack.enter_context(Live(console=console, auto_refresh=False))
        print_at = -math.inf
        while True:
            if live is not None:
                live.update(rendered(training.table()), refresh=True)
            elif training.workers and (training.finished or time.monotonic() >= print_at):
                print_table(training.table())
                print_at = time.monotonic() + _PRINT_SECONDS
            if training.finished:
                return
            time.sleep(_LOOK_SECONDS)
            training.read()


class Training:
    """The workers of a training, read from the files of their records.

    Args:
        path: A file, the ``log`` argument of ``attach``, or a directory of ``.jsonl`` files.

    Attributes:
        workers: The workers with at least one record, in the order of their files.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._by_file: dict[Path, WorkerRecords] = {}
        if not path.is_dir() and not files_of(path):
            raise FileNotFoundError(f"looked for records in {path}, which does not exist")
        self.read()

    def read(self) -> None:
        """Read what was appended since the last call, also in files that are new."""
        for file in files_of(self._path):
            self._by_file.setdefault(file, WorkerRecords(file)).read()
        ordered = [self._by_file[file] for file in sorted(self._by_file, key=_natural)]
        self.workers = [worker for worker in ordered if worker.last]

    @property
    def finished(self) -> bool:
        """True if every worker has taken all its steps. Requires ``total_steps`` in the records."""
        return bool(self.workers) and all(worker.steps_left == 0 for worker in self.workers)

    def table(self) -> Table:
        """Return a table with one row per worker."""
        names = [str(worker.last.get("rank")) for worker in self.workers]
        if len({*names}) < len(names):  # the files of several trainings
            names = [worker.path.stem for worker in self.workers]
        rows = [(name, *worker.cells()) for name, worker in zip(names, self.workers, strict=True)]
        left = [worker.seconds_left for worker in self.workers]
        state = "" if rows else ": no records yet"
        if any(left):
            state = f": {show_time_left(max(left))}"
        headings = ("worker", "step", "steps/s", "loss", "trend", "idle", "staleness", "sends")
        return Table((*headings, "updated"), tuple(rows), f"{self._path}{state}")


class WorkerRecords:
    """The newest records of one worker.

    Attributes:
        path: The file.
        last: The newest record; empty if there is none.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.last: dict[str, Any] = {}
        self._end = 0  # bytes read so far
        self._modified = 0.0  # time of the last change of the file
        self._losses: deque[float] = deque(maxlen=_TREND_STEPS)
        self._recent: deque[tuple[float, float, float]] = deque()  # seconds, waiting, bytes

    def read(self) -> None:
        """Read what was appended since the last call. Lines that are not records are skipped."""
        with contextlib.suppress(FileNotFoundError), self.path.open("rb") as file:
            status = os.fstat(file.fileno())
            self._modified = status.st_mtime
            if status.st_size < self._end:  # another training has begun the file again
                self._end = 0
            file.seek(self._end)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._end += len(line)
                with contextlib.suppress(ValueError):
                    record = json.loads(line)
                    if isinstance(record, dict) and isinstance(record.get("step"), int):
                        self._add(record)
        seconds = sum(step[0] for step in self._recent)
        while len(self._recent) > 1 and seconds > _RATE_SECONDS:
            seconds -= self._recent.popleft()[0]

    def _add(self, record: dict[str, Any]) -> None:
        if self.last and record["step"] <= self.last["step"]:  # another training in the same file
            self._losses.clear()
            self._recent.clear()
        self.last = record
        names = ("compute_seconds", "wait_seconds", "payload_bytes")
        computed, waited, sent = (_number(record.get(name, 0)) for name in names)
        self._recent.append((computed + waited, waited, sent))
        if "loss" in record:
            self._losses.append(_number(record["loss"]))

    @property
    def steps_left(self) -> float:
        """Number of steps to the last one; NaN if the records have no ``total_steps``."""
        left = _number(self.last.get("total_steps")) - self.last["step"]
        return 0.0 if left < 0 else left

    @property
    def seconds_left(self) -> float:
        """Time to the last step at the present speed; 0 if unknown."""
        seconds = sum(step[0] for step in self._recent) * self.steps_left / len(self._recent)
        return seconds if math.isfinite(seconds) else 0.0

    def cells(self) -> tuple[str, ...]:
        """Return the cells of the worker's row, without its name; "-" for unknown values."""
        seconds, waited, sent = (sum(values) for values in zip(*self._recent, strict=True))
        known, total = seconds > 0, self.last.get("total_steps")
        age = show_duration(max(0.0, time.time() - self._modified))
        return (
            f"{self.last['step']}" if total is None else f"{self.last['step']}/{total}",
            f"{len(self._recent) / seconds:.3g}" if known else "-",
            f"{self._losses[-1]:.4g}" if self._losses else "-",
            sparkline([*self._losses]) or "-",
            f"{waited / seconds:.0%}" if known else "-",
            str(self.last.get("staleness", "-")),
            show_rate(sent / seconds) if known else "-",
            "finished" if self.steps_left == 0 else f"{age} ago",
        )


def files_of(path: Path) -> list[Path]:
    """Return the files of records that ``path`` names.

    These are the file itself, the ``.jsonl`` files in a directory, or the files that the workers
    write with ``attach(log=path)``: ``run.rank0.jsonl`` and so on for ``run.jsonl``.
    """
    if path.is_file():
        return [path]
    if path.is_dir():
        return [*path.glob("*.jsonl")]
    if "{rank}" not in str(path):
        path = path.with_name(f"{path.stem}.rank{{rank}}{path.suffix}")
    return [Path(file) for file in glob.glob(glob.escape(str(path)).replace("{rank}", "*"))]


def sparkline(values: Sequence[float], width: int = 12) -> str:
    """Return at most ``width`` blocks, whose heights are the means of successive values.

    A mean that is NaN or infinite is drawn as "×".
    """
    bounds = [i * len(values) // width for i in range(width + 1)]
    parts = [values[a:b] for a, b in itertools.pairwise(bounds) if a < b]
    means = [sum(part) / len(part) for part in parts]
    finite = [mean for mean in means if math.isfinite(mean)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(_BLOCKS) - 1) / ((high - low) or 1.0)
    return "".join(
        _BLOCKS[round(scale * (mean - low))] if math.isfinite(mean) else "×" for mean in means
    )


def _number(value: Any) -> float:
    """Return a number in a record, such as "inf" for infinity; NaN for anything else."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def _natural(path: Path) -> list[str | int]:
    """Return a sort key by which rank 10 comes after rank 9."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", str(path))]
