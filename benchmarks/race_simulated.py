"""The race in virtual time, over what real links here cannot be shaped to: latencies, many workers.

Real training, virtual seconds: steps of 80 ms that vary by 5 %, nothing computed for the network,
evaluations that take nothing from the links (``free_looks``). ``python -m benchmarks race
--simulated`` runs what is missing, with ``--workload cnn`` the corners of the map with the CNN.

- ``mlp``: 149,110 parameters on scikit-learn's digits (``models/digits_mlp.py``). A link that is
  called 50 Mbit/s has 50 Mbit/s times the model's bytes over the CNN's, so that a mean of all
  gradients takes as many steps as those of the CNN of 2.1 million parameters on the link of that
  name. Latencies stay, for the step does.
- ``cnn``: that CNN itself on CIFAR-10, on the links as they are called, at the recipe's rate;
  four of the methods, for a run takes minutes.

Every setting of ``GRIDS`` has the factor on the recipe's rate, of ``FACTORS``, with which it ends
best at ``TUNED_AT``, under a seed of its own. Tracks: ``defaults``, every method as it comes but
for that; ``tuned``, of each family the setting that is at the target first, cell by cell, under
that seed; with the seeds that are shown streaming and the first two rivals.
"""

import json
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from benchmarks import free_looks
from benchmarks.harness import RESULTS
from benchmarks.lateness import best_so_far, seconds_to
from benchmarks.race import DATA
from benchmarks.race_figures import Raced
from benchmarks.race_names import DILOCO, OURS
from benchmarks.virtual import Cells, Row
from offbeat.lab.compare import versions
from offbeat.lab.job import Job
from offbeat.simulate import Compute, Network
from offbeat.units import to_bandwidth

FILE = "simulated-race.jsonl"
STEP_SECONDS, LOOKS = 0.08, 24
CNN_BYTES = 8_279_592
SEEDS, TUNING_SEED = (0, 1, 2), 100
FINALISTS = 2
"""Rivals of a cell that are run with the seeds that are shown: the first with the tuning seed."""
SHARE = 0.95
"""Of the ideal's final metric: the target. On real links it is 98 %, where most never are here."""
FACTORS = (0.3, 1.0, 3.0, 10.0)
METHODS = (
    "ideal",
    "streaming",
    OURS,
    "bsp",
    "bsp --wire bfloat16",
    "local:period=16",
    "async",
    "selsync",
)
GRIDS = {
    "streaming": ("streaming", "streaming:outer_gain=1", "streaming:outer_gain=2"),
    "diloco": (DILOCO.format(8), OURS, DILOCO.format(32)),
    "bsp": ("bsp", "bsp --wire bfloat16", "bsp --wire int8"),
    "local": ("local:period=4", "local:period=16", "local:period=64"),
    "async": ("async:staleness=4", "async", "async:staleness=64"),
    "selsync": ("selsync:target_lssr=0.7", "selsync", "selsync:target_lssr=0.97"),
}
"""Family → the settings that are tried. Six families, twelve pairs of setting and factor each."""
MODELS = Path(__file__).parent / "models"


@dataclass(frozen=True)
class Workload:
    """What is trained.

    Attributes:
        file: Of the recipe.
        data: Directory below that of all data; None: it brings its own.
        epochs: Passes over the data.
        model_bytes: Of the parameters.
        factors: On the recipe's rate; one: there is nothing to tune.
        methods: Those that run as they come.
    """

    file: str
    data: str | None
    epochs: float
    model_bytes: int
    factors: tuple[float, ...] = FACTORS
    methods: tuple[str, ...] = METHODS


WORKLOADS = {
    "mlp": Workload("digits_mlp.py", None, 16.0, 596_440),
    "cnn": Workload(
        "cifar_wide.py",
        "cifar10",
        2.0,
        CNN_BYTES,
        factors=(1.0,),
        methods=("ideal", "streaming", OURS, "local:period=16"),  # three minutes a run
    ),
}


@dataclass(frozen=True)
class Cell:
    """Links and workers: of a link its name, with latencies one way in milliseconds.

    More workers train on as many more samples, so that each takes the same number of steps.
    """

    bandwidth: str
    latency: float
    workers: int = 4
    jitter: float = 0.05
    slow: float = 1.0
    halved: float | None = None  # seconds after which the bandwidths are half of it

    @property
    def name(self) -> str:
        """As in ``50Mbit/s 0.1ms``, and what else is not usual."""
        text = f"{self.bandwidth} {self.latency:g}ms"
        text += f" {self.workers} workers" if self.workers != 4 else ""
        text += f" jitter {100 * self.jitter:g} %" if self.jitter != 0.05 else ""
        text += f" one worker {self.slow:g} times slower" if self.slow != 1 else ""
        return text + (f" halved after {self.halved:g} s" if self.halved is not None else "")

    def network(self, workload: Workload) -> Network:
        """The links, scaled to the workload's model."""
        scale = workload.model_bytes / CNN_BYTES
        changes: dict[str | float, float] = {} if self.halved is None else {self.halved: 0.5}
        bandwidth = to_bandwidth(self.bandwidth) * scale
        return Network(bandwidth, self.latency / 1000, changes=changes)

    @property
    def merge_over_step(self) -> float:
        """A mean of all gradients over a step, the same for all workloads."""
        network = self.network(WORKLOADS["cnn"])
        return network.collective_seconds("reduce", CNN_BYTES, range(self.workers)) / STEP_SECONDS


BANDWIDTHS, LATENCIES = ("1Gbit/s", "200Mbit/s", "50Mbit/s", "10Mbit/s"), (0.1, 10.0, 30.0)
MAP = tuple(Cell(bandwidth, latency) for latency in (0.1, 30.0, 10.0) for bandwidth in BANDWIDTHS)
"""The most telling first."""
TUNED_AT = Cell("50Mbit/s", 0.1)
OTHERS = (
    replace(TUNED_AT, jitter=0.2),
    replace(TUNED_AT, slow=2.0),
    replace(TUNED_AT, halved=2.0),
    replace(TUNED_AT, workers=8),
    replace(TUNED_AT, workers=16),
)
CORNERS = tuple(one for one in MAP if one.bandwidth in BANDWIDTHS[::3] and one.latency != 10.0)


@dataclass(frozen=True)
class Simulated:
    """One run. The ideal has no link, so that it is run once for all links."""

    workload: str
    cell: Cell
    method: str
    seed: int


def simulated(workload: str, cell: Cell, method: str, seed: int) -> Simulated:
    """The run of a method in a cell."""
    if method.startswith("ideal"):
        cell = replace(cell, bandwidth=BANDWIDTHS[0], latency=LATENCIES[0])
    return Simulated(workload, cell, method.removesuffix(" --lr-scale 1"), seed)


def run(one: Simulated) -> Row:
    """Train: its points and totals."""
    torch.set_num_threads(1)
    workload, cell = WORKLOADS[one.workload], one.cell
    job = Job(
        str(MODELS / workload.file),
        "bsp",
        cell.workers,
        epochs=workload.epochs * cell.workers / 4,  # as many steps for each
        seed=one.seed,
        data=None if workload.data is None else str(DATA / workload.data),
    ).under(one.method)
    slow = {} if cell.slow == 1 else {0: cell.slow}  # the clock is its own
    compute = Compute(STEP_SECONDS, jitter=cell.jitter, slowdown=slow)
    found = free_looks.train(job, cell.network(workload), compute, LOOKS)
    told = ("wire", "parts", "window", "landings", "outer_gain", "staleness_max")
    return {
        "points": [[round(seconds, 3), round(metric, 4)] for seconds, metric in found.points],
        "steps": found.steps,
        "payload_bytes": found.payload_bytes,
        "idle": round(found.idle, 4),
        "details": {name: found.details[name] for name in told if name in found.details},
    }


class Race:
    """The tracks of one workload.

    Args:
        workload: Of ``WORKLOADS``.
        kept: Rows of the runs that were made.
        cells: Of the map.
        seeds: Of the runs that are shown.
    """

    def __init__(
        self,
        workload: str,
        kept: Cells,
        cells: Sequence[Cell] = MAP,
        seeds: Sequence[int] = SEEDS,
    ) -> None:
        self._workload, self._kept = workload, kept
        self._cells, self._seeds = cells, seeds

    def _runs(
        self, track: str, cell: Cell, methods: Sequence[tuple[str, str]], seeds: Sequence[int]
    ) -> list[Row]:
        """Runs of families' methods, as lines of the results."""
        pairs = [(family, method, seed) for seed in seeds for family, method in methods]
        rows = self._kept.rows(
            [simulated(self._workload, cell, method, seed) for _, method, seed in pairs]
        )
        about = {"workload": self._workload, "track": track, "cell": asdict(cell)}
        return [
            {**about, "family": family, "method": method, "seed": seed, **row}
            for (family, method, seed), row in zip(pairs, rows, strict=True)
        ]

    def rates(self) -> tuple[list[Row], dict[str, str]]:
        """What it took to find each setting's rate, and setting → the method at that rate."""
        tried: list[Row] = []
        found: dict[str, str] = {}
        factors = WORKLOADS[self._workload].factors
        for family, settings in {"ideal": ("ideal",), **GRIDS}.items():
            for setting in settings:
                if len(factors) == 1:
                    found[setting] = f"{setting} --lr-scale {factors[0]:g}"
                    continue
                methods = [(family, f"{setting} --lr-scale {factor:g}") for factor in factors]
                rows = self._runs("tuning", TUNED_AT, methods, [TUNING_SEED])
                tried += rows
                found[setting] = max(rows, key=lambda row: float(row["points"][-1][1]))["method"]
        return tried, found

    def defaults(self, cells: Sequence[Cell]) -> Iterator[Row]:
        """Every method as it comes, at its rate."""
        tried, rates = self.rates()
        yield from tried
        for cell in cells:
            methods = [(one, rates[one]) for one in WORKLOADS[self._workload].methods]
            yield from self._runs("defaults", cell, methods, self._seeds)

    def tuned(self) -> Iterator[Row]:
        """Streaming and the best families as tuned, behind the runs that this took."""
        tried, rates = self.rates()
        yield from tried
        ideal = [row for row in tried if row["method"] == rates["ideal"]]
        target = SHARE * float(ideal[0]["points"][-1][1])
        for cell in self._cells:
            first: dict[str, Row] = {}
            for family, settings in GRIDS.items():
                methods = [(family, rates[setting]) for setting in settings]
                rows = self._runs("tuning", cell, methods, [TUNING_SEED])
                if cell != TUNED_AT:  # where they were tried already
                    yield from rows
                first[family] = min(rows, key=lambda row: _place(row, target))
            rivals = [one for one in GRIDS if one != "streaming"]
            rivals.sort(key=lambda one: _place(first[one], target))
            shown = [(one, first[one]["method"]) for one in ("streaming", *rivals[:FINALISTS])]
            yield from self._runs("tuned", cell, shown, self._seeds)


def _place(row: Row, target: float) -> tuple[float, float]:
    """Who is at the target first is first; of those that never are, who comes nearer."""
    return arrival(row, target), -row["points"][-1][1]


def arrival(row: Row, target: float) -> float:
    """Seconds to the target, on the straight lines between the points; infinite: never."""
    found = seconds_to(best_so_far([*map(tuple, row["points"])], less=False), target)
    return math.inf if found is None else found


def write(rows: Sequence[Row], path: Path) -> None:
    """One line a run; of those that were only tried the end alone."""
    lines = []
    for row in rows:
        told = dict(row)
        if row["track"] == "tuning":
            told["points"] = row["points"][-1:]
        lines.append(json.dumps({"simulated": True, "versions": versions(), **told}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def read(folder: Path = RESULTS) -> list[Row]:
    """The lines of the results; none if there are none."""
    path = folder / FILE
    if not path.exists():
        return []
    found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [{**one, "cell": Cell(**one["cell"])} for one in found]


def raced(rows: Sequence[Row], workload: str, track: str) -> dict[Cell, Raced]:
    """The cells of a track: family → median seconds to ``SHARE`` of the ideal's final metric.

    In all tracks the ideal is that of the defaults.
    """
    own = [row for row in rows if row["workload"] == workload]
    found = {}
    for cell in dict.fromkeys(row["cell"] for row in own if row["track"] == track):
        here = [row for row in own if row["cell"] == cell]
        ideal = [row for row in here if row["track"] == "defaults" and row["family"] == "ideal"]
        target = SHARE * statistics.median(row["points"][-1][1] for row in ideal)
        members: dict[str, list[Row]] = {"ideal": ideal}
        for row in here:
            if row["track"] == track and row["family"] != "ideal":
                members.setdefault(row["family"], []).append(row)
        times = {
            family: statistics.median(arrival(row, target) for row in of)
            for family, of in members.items()
        }
        name = "simulated" if track == "defaults" else f"simulated-{track}"
        seeds = len({row["seed"] for row in ideal})
        found[cell] = Raced(name, cell.name, times, cell.merge_over_step, seeds)
    return found


def tried(rows: Sequence[Row], workload: str = "mlp") -> dict[str, int]:
    """Family → how many runs its tuning took."""
    found: dict[str, int] = {}
    for row in rows:
        if row["workload"] == workload and row["track"] == "tuning":
            found[row["family"]] = found.get(row["family"], 0) + 1
    return found


def run_all(workload: str, folder: Path = RESULTS) -> Path:
    """Run what is missing, the most telling first, and write the results; other workloads stay."""
    kept = Cells(run, folder / "cells" / "race-simulated.jsonl", processes=0)
    path = folder / FILE
    if workload == "mlp":
        thirds = [Race(workload, kept, MAP[i : i + 4]) for i in (0, 4, 8)]
        race = thirds[0]
        tracks = (
            *(race.defaults(MAP[:8]), Race(workload, kept, [TUNED_AT]).tuned()),
            *(race.defaults(OTHERS[:3]), race.tuned(), thirds[1].tuned()),
            *(race.defaults(MAP[8:]), thirds[2].tuned()),
            race.defaults(OTHERS[3:]),
        )
    else:
        tracks = (Race(workload, kept, seeds=SEEDS[:1]).defaults(CORNERS),)
    rows = [{**row, "cell": asdict(row["cell"])} for row in read(folder)]
    rows = [row for row in rows if row["workload"] != workload]
    for track in tracks:
        try:
            for row in track:
                if row not in rows:  # rates are tuned once for all cells
                    rows.append(row)
        finally:  # what was run is there if it is stopped
            write(rows, path)
    return path
