"""The race on real processes: workloads, links, methods, and the grid of cells.

A *cell* is one workload on one kind of links. Its results are in
``results/race-TRACK-CELL.jsonl``. There are two tracks: ``defaults`` runs every method at its
recipe's learning rate; ``tuned`` also tries the factors of ``TRACKS`` and shows the best.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import RESULTS
from benchmarks.race.methods import DILOCO, DILOCO_OF_PERIOD
from offbeat.lab.job import Job
from offbeat.lab.launch.runners import Loopback, Runner, ShapedLinks
from offbeat.units import parse_bandwidth

WORKERS, SEEDS = 4, 3
TRACKS: dict[str, tuple[float, ...]] = {"defaults": (), "tuned": (0.3, 1.0, 3.0)}
"""Track → factors on the recipe's learning rate."""
MAX_SECONDS = 120.0
"""Time limit of a run, more than twice what the ideal network takes."""
METHODS = (
    "ideal",
    "streaming",
    DILOCO,
    DILOCO_OF_PERIOD.format(8),
    DILOCO_OF_PERIOD.format(32),
    "bsp",
    "torch:ddp",
    "torch:ddp,hook=bf16",
    "torch:ddp,hook=powersgd,rank=2",
    "torch:postlocal,period=16",
    "torch:postlocal,period=64",
    "torch:accumulate,steps=4",
    "torchft:localsgd,period=16",
    "torchft:diloco,period=32,fragments=4,delay=4",
    "accelerate:localsgd,period=16",
)


@dataclass(frozen=True)
class Workload:
    """A training task.

    Attributes:
        recipe: Name or file of the recipe.
        data: Subdirectory of the data directory; None if the recipe needs no files.
        epochs: Passes over the data.
        step_seconds: Time of a step, longer than what computing takes four workers on two cores.
    """

    recipe: str
    data: str | None
    epochs: float
    step_seconds: float


WORKLOADS = {
    "cifar": Workload("benchmarks/models/cifar_wide.py", "cifar10", 4.0, 0.2),  # 2.1 M parameters
    "mnist": Workload("mnist", "mnist", 2.0, 0.04),
    "lm": Workload("stdlib-lm", None, 0.5, 0.4),  # AdamW
}
LINKS = {"lan": "1Gbit/s", "office": "200Mbit/s", "wan": "50Mbit/s", "dsl": "10Mbit/s"}


@dataclass(frozen=True)
class Cell:
    """One workload on one kind of links.

    Attributes:
        name: Words joined by dashes; each word selects the cell on the command line.
        workload: Training task.
        bandwidth: Bandwidth of each link; None for loopback.
        later: Bandwidth in the second half of each run; None if it stays the same.
        jitter: Relative variation of the step time.
        slow: Slower workers as text, such as ``0=2``; None if all are equally fast.
        workers: Number of workers.
        methods: Methods to run.
        seeds: Number of seeds.
    """

    name: str
    workload: Workload
    bandwidth: str | None
    later: str | None = None
    jitter: float = 0.0
    slow: str | None = None
    workers: int = WORKERS
    methods: tuple[str, ...] = METHODS
    seeds: int = SEEDS

    def job(self, data: Path) -> Job:
        """Return the settings that all runs of this cell share, given the data directory."""
        return Job(
            self.workload.recipe,
            "bsp",
            self.workers,
            epochs=self.workload.epochs,
            data=None if self.workload.data is None else str(data / self.workload.data),
            evaluations=16,
            max_seconds=MAX_SECONDS,
            timeout_seconds=600.0,
            jitter=self.jitter,
            slow=self.slow,
            measure_links=True,
            step_seconds=self.workload.step_seconds,
        )

    @contextlib.contextmanager
    def runner(self) -> Iterator[Runner]:
        """Shape the links of this cell, and remove them afterwards."""
        if self.bandwidth is None:
            yield Loopback()
            return
        later = None if self.later is None else parse_bandwidth(self.later)
        with ShapedLinks(self.workers, parse_bandwidth(self.bandwidth), later) as links:
            yield links


def _grid() -> tuple[Cell, ...]:
    cells = []
    for name, workload in WORKLOADS.items():
        cells += [Cell(f"{name}-{link}", workload, rate) for link, rate in LINKS.items()]
        office = LINKS["office"]
        cells += [
            Cell(f"{name}-jitter", workload, office, jitter=0.2),
            Cell(f"{name}-slow", workload, office, slow="0=2"),
            Cell(f"{name}-halved", workload, office, later="100Mbit/s"),
        ]
    return tuple(cells)


CELLS = _grid()
TINY = Cell(
    "tiny",
    Workload("digits", None, 0.5, 0.02),
    None,
    workers=2,
    methods=("ideal", "streaming", "torch:ddp"),
    seeds=1,
)
"""A check of the installation that takes seconds. No table shows it."""


def select_cells(texts: Sequence[str]) -> list[Cell]:
    """Return the cells with these names, or with these words in their names; without texts all.

    Raises:
        ValueError: A text selects no cell.
    """
    if not texts:
        return list(CELLS)
    found = []
    for text in texts:
        cells = [one for one in (*CELLS, TINY) if text == one.name or text in one.name.split("-")]
        if not cells:
            names = ", ".join(one.name for one in (*CELLS, TINY))
            raise ValueError(f"there is no cell {text!r}; there are {names}, and parts of these")
        found += [one for one in cells if one not in found]
    return found


def select_methods(cell: Cell, prefixes: Sequence[str]) -> list[str]:
    """Return the cell's methods that start with one of the prefixes; without prefixes all.

    Raises:
        ValueError: No method starts with one of the prefixes.
    """
    for prefix in prefixes:
        if not any(one.startswith(prefix) for one in cell.methods):
            raise ValueError(f"no method of {cell.name} begins with {prefix!r}")
    return [one for one in cell.methods if not prefixes or one.startswith(tuple(prefixes))]


def path_of(cell: Cell, track: str, folder: Path = RESULTS) -> Path:
    """Return the path of the cell's results."""
    return folder / f"race-{track}-{cell.name}.jsonl"
