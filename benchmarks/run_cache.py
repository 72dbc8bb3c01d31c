"""A cache of training runs in virtual time, so that an interrupted benchmark resumes.

A *cell* is one run: a frozen dataclass, such as a ``Job``. Its *row* is what the run returned, as
JSON values. Rows are kept in ``results/cells/NAME.jsonl`` with a fingerprint of Offbeat's source;
after a change of the source every cell runs again.
"""

import hashlib
import json
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

import offbeat
from benchmarks.harness import RESULTS
from offbeat.simulate import Compute, Network
from offbeat_lab.compare import run_and_record
from offbeat_lab.job import Job
from offbeat_lab.launch.runners import VirtualCluster
from offbeat_lab.recipes import mnist

WORKERS = 8
SEEDS = (0, 1, 2)
Row = dict[str, Any]
_read_once = cache(mnist.read_idx)


def place() -> VirtualCluster:
    """Return the cluster of the studies: 100 Mbit/s, and steps of 10 ms that vary by 20 %."""
    return VirtualCluster(Network("100Mbit/s", latency="100us"), Compute("10ms", jitter=0.2))


def plain(cell: Any) -> Row:
    """Return the cell as JSON values, with only the last part of the data's path."""
    values = asdict(cell)
    if values.get("data") is not None:
        values["data"] = Path(values["data"]).name
    return values


def run(job: Job) -> Row:
    """Run a job at ``place``; return its row."""
    return run_at(job, place())


def run_at(job: Job, where: VirtualCluster) -> Row:
    """Run a job on a virtual cluster; return its row."""
    torch.set_num_threads(1)
    mnist.read_idx = _read_once  # read the files once for all workers and runs
    result = run_and_record(job, lambda event: None, where)
    samples = [one.details.get("injected_bytes_sent", 0) for one in result.stats]
    return {
        "job": plain(job),
        "steps": result.points[-1].step,
        "points": [asdict(point) for point in result.points],
        "final": result.final,
        "seconds": result.seconds,
        "lssr": result.lssr,
        "idle": result.idle,
        "payload_bytes": result.payload_bytes,
        "sample_bytes": statistics.mean(samples),
    }


@cache
def fingerprint() -> str:
    """Return a hash of Offbeat's source files."""
    root = Path(offbeat.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


class RunCache:
    """Returns the rows of cells, and runs those that are not in its file.

    Args:
        function: Function at the top level of a module that runs a cell and returns its row.
        path: File of the rows; None keeps them in memory only.
        processes: Number of processes that run cells; 0 runs them in this process.
        progress: True to print each cell that was run, with its wall time.
    """

    def __init__(
        self,
        function: Callable[[Any], Row],
        path: Path | None,
        *,
        processes: int = 2,
        progress: bool = False,
    ) -> None:
        self._function, self._path, self._processes = function, path, processes
        self._progress = progress
        self._rows: dict[str, Row] = {}
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                saved = json.loads(line)
                self._rows[saved["key"]] = saved["row"]

    @classmethod
    def named(cls, name: str, function: Callable[[Any], Row], *, quick: bool) -> "RunCache":
        """Return the cache of a benchmark; with ``quick`` it is in memory only."""
        return cls(function, None if quick else RESULTS / "cells" / f"{name}.jsonl")

    def rows(self, cells: Sequence[Any]) -> list[Row]:
        """Return the row of each cell, in order."""
        keys = [json.dumps([fingerprint(), plain(cell)], sort_keys=True) for cell in cells]
        missing = {
            key: cell for key, cell in zip(keys, cells, strict=True) if key not in self._rows
        }
        if self._processes == 0:
            for key, cell in missing.items():
                start = time.perf_counter()
                self._add(key, self._function(cell))
                if self._progress:
                    print(f"{time.perf_counter() - start:6.1f} s  {cell}", flush=True)
        elif missing:
            # A pool for each call, so that an interrupted call leaves no process behind.
            context = get_context("spawn")
            with ProcessPoolExecutor(self._processes, mp_context=context) as pool:
                running = {pool.submit(self._function, cell): key for key, cell in missing.items()}
                for done in as_completed(running):
                    self._add(running[done], done.result())
        return [self._rows[key] for key in keys]

    def _add(self, key: str, row: Row) -> None:
        self._rows[key] = row
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write(json.dumps({"key": key, "row": row}) + "\n")


def grouped(
    rows: Sequence[Row], *keys: str, field: str = "job"
) -> dict[tuple[Any, ...], list[Row]]:
    """Group rows by these keys of a field, in order, so that a group differs in its seeds only."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[field][key] for key in keys), []).append(row)
    return groups


def spread(values: Sequence[float], scale: float = 100.0, digits: int = 1) -> str:
    """Return median and range as text, in percent by default."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{scale * middle:.{digits}f} ({scale * low:.{digits}f}–{scale * high:.{digits}f})"


def arrival(points: Sequence[Row], target: float) -> float | None:
    """Return the seconds of the first evaluation at the target or better; None if there is none."""
    return next((one["seconds"] for one in points if one["metric"] >= target), None)
