"""Run the race in virtual time.

Every setting of ``GRIDS`` has a factor on the recipe's learning rate: the one with which it ends
best at ``TUNED_AT``, under a seed that is not shown. The track ``defaults`` runs every method with
that rate and nothing else set. The track ``tuned`` chooses, cell by cell, the setting of each
family that reaches the target first under the tuning seed; streaming averaging and the first two
rivals then run under the shown seeds.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean

import torch

from benchmarks.harness import DATA, RESULTS
from benchmarks.race.simulated_results import FILE, arrival, read
from benchmarks.race.simulated_settings import (
    BANDWIDTHS,
    CORNERS,
    EVALUATIONS,
    FINALISTS,
    GRIDS,
    LATENCIES,
    MAP,
    MODELS,
    OTHERS,
    SEEDS,
    SHARE,
    STEP_SECONDS,
    TUNED_AT,
    TUNING_SEED,
    WORKLOADS,
    Cell,
)
from benchmarks.run_cache import Row, RunCache
from offbeat.lab.compare import run_and_record, versions
from offbeat.lab.job import Job
from offbeat.lab.launch.runners import VirtualCluster
from offbeat.simulate import Compute

_DETAILS = ("wire", "parts", "window", "landings", "outer_gain", "staleness_max")


@dataclass(frozen=True)
class Simulated:
    """One run."""

    workload: str
    cell: Cell
    method: str
    seed: int


def simulated(workload: str, cell: Cell, method: str, seed: int) -> Simulated:
    """Return the run of a method in a cell; the ideal network is one run for all links."""
    if method.startswith("ideal"):
        cell = replace(cell, bandwidth=BANDWIDTHS[0], latency=LATENCIES[0])
    return Simulated(workload, cell, method.removesuffix(" --lr-scale 1"), seed)


def run(one: Simulated) -> Row:
    """Train, and return the points and totals."""
    torch.set_num_threads(1)
    workload, cell = WORKLOADS[one.workload], one.cell
    job = Job(
        str(MODELS / workload.file),
        "bsp",
        cell.workers,
        epochs=workload.epochs * cell.workers / 4,  # the same number of steps for each worker
        seed=one.seed,
        evaluations=EVALUATIONS,
        data=None if workload.data is None else str(DATA / workload.data),
    ).under(one.method)
    slow = {} if cell.slow == 1 else {0: cell.slow}
    compute = Compute(STEP_SECONDS, jitter=cell.jitter, slowdown=slow)
    cluster = VirtualCluster(cell.network(workload), compute)
    found = run_and_record(job, lambda event: None, cluster)
    stats = found.stats
    return {
        "points": [[round(point.seconds, 3), round(point.metric, 4)] for point in found.points],
        "steps": stats[0].steps,
        "payload_bytes": fmean(one.payload_bytes for one in stats),
        "idle": round(fmean(one.idle for one in stats), 4),
        "details": {name: found.details[name] for name in _DETAILS if name in found.details},
    }


class Race:
    """The tracks of one workload.

    Args:
        workload: Key of ``WORKLOADS``.
        cache: Runs that were made already.
        cells: Cells of the track ``tuned``.
        seeds: Seeds of the runs that are shown.
    """

    def __init__(
        self,
        workload: str,
        cache: RunCache,
        cells: Sequence[Cell] = MAP,
        seeds: Sequence[int] = SEEDS,
    ) -> None:
        self._workload, self._cache = workload, cache
        self._cells, self._seeds = cells, seeds

    def _runs(
        self, track: str, cell: Cell, methods: Sequence[tuple[str, str]], seeds: Sequence[int]
    ) -> list[Row]:
        """Return the runs of (family, method) pairs as rows of the results."""
        pairs = [(family, method, seed) for seed in seeds for family, method in methods]
        rows = self._cache.rows(
            [simulated(self._workload, cell, method, seed) for _, method, seed in pairs]
        )
        about = {"workload": self._workload, "track": track, "cell": asdict(cell)}
        return [
            {**about, "family": family, "method": method, "seed": seed, **row}
            for (family, method, seed), row in zip(pairs, rows, strict=True)
        ]

    def rates(self) -> tuple[list[Row], dict[str, str]]:
        """Return the runs that tuned the rates, and the method at its rate for each setting."""
        tuning: list[Row] = []
        found: dict[str, str] = {}
        factors = WORKLOADS[self._workload].factors
        for family, settings in {"ideal": ("ideal",), **GRIDS}.items():
            for setting in settings:
                if len(factors) == 1:
                    found[setting] = f"{setting} --lr-scale {factors[0]:g}"
                    continue
                methods = [(family, f"{setting} --lr-scale {factor:g}") for factor in factors]
                rows = self._runs("tuning", TUNED_AT, methods, [TUNING_SEED])
                tuning += rows
                found[setting] = max(rows, key=lambda row: float(row["points"][-1][1]))["method"]
        return tuning, found

    def defaults(self, cells: Sequence[Cell]) -> Iterator[Row]:
        """Yield the runs of the track ``defaults``, after those that tuned the rates."""
        tuning, rates = self.rates()
        yield from tuning
        for cell in cells:
            methods = [(one, rates[one]) for one in WORKLOADS[self._workload].methods]
            yield from self._runs("defaults", cell, methods, self._seeds)

    def tuned(self) -> Iterator[Row]:
        """Yield the runs of the track ``tuned``, after those that tuned it."""
        tuning, rates = self.rates()
        yield from tuning
        ideal = [row for row in tuning if row["method"] == rates["ideal"]]
        target = SHARE * float(ideal[0]["points"][-1][1])

        def rank(row: Row) -> tuple[float, float]:
            """Earlier arrival first; of runs that never arrive, the better final metric."""
            return arrival(row, target), -row["points"][-1][1]

        for cell in self._cells:
            first: dict[str, Row] = {}
            for family, settings in GRIDS.items():
                methods = [(family, rates[setting]) for setting in settings]
                rows = self._runs("tuning", cell, methods, [TUNING_SEED])
                if cell != TUNED_AT:  # at that cell they are among the runs that tuned the rates
                    yield from rows
                first[family] = min(rows, key=rank)
            rivals = [one for one in GRIDS if one != "streaming"]
            rivals.sort(key=lambda one: rank(first[one]))
            shown = [(one, first[one]["method"]) for one in ("streaming", *rivals[:FINALISTS])]
            yield from self._runs("tuned", cell, shown, self._seeds)


def write(rows: Sequence[Row], path: Path) -> None:
    """Write one JSON line per run; a tuning run keeps only its last point."""
    lines = []
    for row in rows:
        if row["track"] == "tuning":
            row = {**row, "points": row["points"][-1:]}
        lines.append(json.dumps({"simulated": True, "versions": versions(), **row}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def run_all(workload: str, folder: Path = RESULTS) -> Path:
    """Run what is missing of a workload, and write the results; other workloads' rows stay.

    Returns:
        The path of the results.
    """
    cache = RunCache(run, folder / "cells" / "race-simulated.jsonl", processes=0)
    path = folder / FILE
    if workload == "mlp":
        thirds = [Race(workload, cache, MAP[i : i + 4]) for i in (0, 4, 8)]
        race = thirds[0]
        tracks = (
            *(race.defaults(MAP[:8]), Race(workload, cache, [TUNED_AT]).tuned()),
            *(race.defaults(OTHERS[:3]), race.tuned(), thirds[1].tuned()),
            *(race.defaults(MAP[8:]), thirds[2].tuned()),
            race.defaults(OTHERS[3:]),
        )
    else:
        tracks = (Race(workload, cache, seeds=SEEDS[:1]).defaults(CORNERS),)
    rows = [{**row, "cell": asdict(row["cell"])} for row in read(folder)]
    rows = [row for row in rows if row["workload"] != workload]
    for track in tracks:
        try:
            for row in track:
                if row not in rows:  # every track repeats the runs that tuned the rates
                    rows.append(row)
        finally:  # an interrupted race keeps what it ran
            write(rows, path)
    return path
