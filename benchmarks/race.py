"""The race: every method on every cell of a declared grid, on real processes behind shaped links.

``python -m benchmarks race --track defaults --cells lan`` runs the cells that are called so, one
after the other; what is in their files already is not run again. ``--list`` shows all of them,
``--table`` prints the table of the README from what was run, ``--figures`` draws. ``--late`` prints
how late all are against the ideal, with ``--steady`` against one step for all its runs, with
``--against`` how much less late the default is than another method under the same seeds.
``--simulated`` is the race in virtual time (``race_simulated``), over latencies and more workers.

Two tracks: ``defaults`` has every method at its recipe's learning rate, ``tuned`` each with the
factors of ``TRACKS``, the best by the final metric; what ``defaults`` has with factor 1 is taken
from there. No run goes on past ``MOST_SECONDS``. A cell's
runs are in ``results/race-TRACK-CELL.jsonl``; ``offbeat report`` makes a page of one.
"""

import argparse
import contextlib
import importlib.util
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks import race_figures, race_late
from benchmarks.harness import RESULTS
from benchmarks.race_names import DILOCO, EARLIER, OURS
from offbeat.lab.compare import compare
from offbeat.lab.events import Evaluation, Event
from offbeat.lab.job import Job
from offbeat.lab.launch.runners import Loopback, Runner, ShapedLinks
from offbeat.lab.methods.peer import Peer
from offbeat.lab.methods.registry import parse_method
from offbeat.lab.results import Result, read_results
from offbeat.units import parse_bandwidth

DATA = Path(__file__).parents[2] / "shared" / "data"
WORKERS, SEEDS = 4, 3
TRACKS: dict[str, tuple[float, ...]] = {"defaults": (), "tuned": (0.3, 1.0, 3.0)}
"""Factors on the learning rate."""
MOST_SECONDS = 120.0
"""After which a run ends: more than twice what the ideal takes."""
METHODS = (
    "ideal",
    "streaming",
    OURS,
    DILOCO.format(8),
    DILOCO.format(32),
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
    """What is trained.

    Attributes:
        recipe: Its name, or file.
        data: Directory below that of all data; None: it brings its own.
        epochs: Passes over the data.
    """

    recipe: str
    data: str | None
    epochs: float


WORKLOADS = {
    "cifar": Workload("benchmarks/models/cifar_wide.py", "cifar10", 4.0),  # 2.1 M parameters
    "mnist": Workload("mnist", "mnist", 2.0),
    "lm": Workload("stdlib-lm", None, 0.5),  # AdamW
}
LINKS = {"lan": "1Gbit/s", "office": "200Mbit/s", "wan": "50Mbit/s", "dsl": "10Mbit/s"}


@dataclass(frozen=True)
class Cell:
    """Where and what is raced.

    Attributes:
        name: Parts with dashes between them; each of them selects it.
        workload: See ``WORKLOADS``.
        bandwidth: Of each link; None: loopback.
        later: In the second half of each run; None: the same.
        jitter: Of the steps.
        slow: Slower workers, as in ``0=2``.
        workers: N.
        methods: Those that run.
        seeds: How many.
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
        """What all its runs share."""
        return Job(
            self.workload.recipe,
            "bsp",
            self.workers,
            epochs=self.workload.epochs,
            data=None if self.workload.data is None else str(data / self.workload.data),
            evaluations=16,
            max_seconds=MOST_SECONDS,
            timeout_seconds=600.0,
            jitter=self.jitter,
            slow=self.slow,
            measure_links=True,
            measure_alone=True,
        )

    @contextlib.contextmanager
    def place(self) -> Iterator[Runner]:
        """Its links, for as long as they are needed."""
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
            Cell(f"{name}-slow", workload, office, slow="0=2"),  # the clock is its own
            Cell(f"{name}-halved", workload, office, later="100Mbit/s"),
        ]
    return tuple(cells)


CELLS = _grid()
TINY = Cell(
    "tiny",
    Workload("digits", None, 0.5),
    None,
    workers=2,
    methods=("ideal", "streaming", "torch:ddp"),
    seeds=1,
)
"""To see that everything works, in seconds; in no table."""


def chosen(texts: Sequence[str]) -> list[Cell]:
    """The cells of these names, or with these parts in their names; all, if there are none.

    Raises:
        ValueError: there is no such cell.
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


def path_of(cell: Cell, track: str, folder: Path = RESULTS) -> Path:
    """Where its results are."""
    return folder / f"race-{track}-{cell.name}.jsonl"


def installed(methods: Sequence[str]) -> list[str]:
    """Those that can run here; says which cannot."""
    kept = []
    for text in methods:
        method = parse_method(text.split()[0])
        if isinstance(method, Peer) and importlib.util.find_spec(method.package) is None:
            print(f"{text} left out: {method.package} is not installed (pip install '.[peers]')")
        else:
            kept.append(text)
    return kept


def run(
    cell: Cell,
    track: str,
    *,
    methods: Sequence[str] = (),
    seeds: int | None = None,
    data: Path = DATA,
    folder: Path = RESULTS,
    place: Runner | None = None,
) -> list[Result]:
    """Run what is missing of a cell; the results of these methods and seeds.

    Args:
        cell: Which one.
        track: Of ``TRACKS``.
        methods: Those of the cell that begin so; none: all.
        seeds: So many at most.
        data: Directory of all data.
        folder: Of the results.
        place: Instead of its links.
    """
    job = cell.job(data)
    texts = installed(of_method(cell, methods))
    count = cell.seeds if seeds is None else min(seeds, cell.seeds)
    if 1.0 in TRACKS[track]:
        _take_over(cell, track, texts, count, folder)
    with contextlib.nullcontext(place) if place is not None else cell.place() as where:
        return compare(
            job,
            texts,
            seeds=count,
            lr_scales=TRACKS[track],
            runner=where,
            output=path_of(cell, track, folder),
            on_start=lambda one: print(f"{cell.name}  {one.label}  seed {one.seed}", flush=True),
            on_event=_say,
            command=_command(cell, track),
            may_differ=["measure_alone"],  # older runs took no turns, and are marked in the tables
        )


def _command(cell: Cell, track: str) -> str:
    return f"python -m benchmarks race --track {track} --cells {cell.name}"


def _take_over(cell: Cell, track: str, texts: Sequence[str], seeds: int, folder: Path) -> None:
    """At the recipe's own rate a run is that of the track ``defaults``, if it is there."""
    there, here = path_of(cell, "defaults", folder), path_of(cell, track, folder)
    if not there.exists():
        return
    known = {(one.label, one.job.seed) for one in (read_results(here) if here.exists() else ())}
    for one in read_results(there):
        wanted = one.label in texts and one.job.seed < seeds
        if wanted and (one.label, one.job.seed) not in known:
            told = replace(one, lr_scales=TRACKS[track], command=_command(cell, track))
            with here.open("a", encoding="utf-8") as file:
                file.write(json.dumps(told.to_dict()) + "\n")


def of_method(cell: Cell, texts: Sequence[str]) -> list[str]:
    """The cell's methods that begin with one of these; all, if there are none.

    Raises:
        ValueError: one of them begins no method.
    """
    for text in texts:
        if not any(one.startswith(text) for one in cell.methods):
            raise ValueError(f"no method of {cell.name} begins with {text!r}")
    return [one for one in cell.methods if not texts or one.startswith(tuple(texts))]


def _say(event: Event) -> None:
    if isinstance(event, Evaluation):
        print(f"  step {event.step}  {event.seconds:.1f} s  {event.metric:.4f}", flush=True)


def main(argv: Sequence[str]) -> None:
    """``python -m benchmarks race …``."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks race",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--track", choices=(*TRACKS, EARLIER), default="defaults")
    parser.add_argument("--cells", default="", help="names or parts of names, with commas; all")
    parser.add_argument("--method", action="append", default=[], help="only those that begin so")
    parser.add_argument("--seeds", type=int, help="so many at most")
    parser.add_argument("--data", type=Path, default=DATA, help="directory of cifar10/ and mnist/")
    parser.add_argument("--output", type=Path, default=RESULTS, help="directory of the results")
    parser.add_argument("--list", action="store_true", help="only show the cells")
    parser.add_argument("--table", action="store_true", help="only print the table")
    parser.add_argument("--late", help="only print how late all are at, as in 10,20,30 seconds")
    parser.add_argument("--steady", action="store_true", help="--late: one step for all ideals")
    parser.add_argument("--against", help="--late: what the other method begins with")
    parser.add_argument("--figures", action="store_true", help="only draw, from what was run")
    parser.add_argument("--simulated", action="store_true", help="in virtual time instead")
    parser.add_argument("--workload", choices=("mlp", "cnn"), default="mlp", help="simulated")
    told = parser.parse_args(argv)
    try:
        cells = chosen([text for text in told.cells.split(",") if text])
        for cell in cells:
            of_method(cell, told.method)
    except ValueError as error:
        parser.error(str(error))
    if told.simulated:
        from benchmarks import race_simulated  # which needs what is above

        print(race_simulated.run_all(told.workload, told.output))
    elif told.list:
        for cell in cells:
            print(f"{cell.name:14} {len(cell.methods)} methods, {cell.seeds} seeds")
    elif told.table:
        print(race_figures.table(race_figures.read(told.output)))
    elif told.against and not told.late:
        parser.error("--against goes with --late")
    elif told.against and (told.steady or told.seeds or told.cells):
        parser.error("--against shows all cells: no --steady, --seeds or --cells with it")
    elif told.against:
        seconds = [float(at) for at in told.late.split(",")]
        text = race_late.against(told.output, seconds, told.against, told.track)
        if not text:
            parser.error(f"no workload has three runs of the default and of {told.against!r}")
        print(text)
    elif told.late:
        seconds = [float(at) for at in told.late.split(",")]
        text = race_late.late(
            told.output,
            seconds,
            told.track,
            steady=told.steady,
            seeds=told.seeds,
            only=[cell.name for cell in cells],
        )
        if not text:
            span = f"{min(seconds):g} to {max(seconds):g} s"
            parser.error(f"the ideal of none of these cells was trained and looked at from {span}")
        print(text)
    elif told.steady:
        parser.error("--steady goes with --late")
    elif told.track == EARLIER:
        parser.error(f"--track {EARLIER}: that is only shown, with --late")
    elif told.figures:
        for path in race_figures.draw(race_figures.read(told.output), told.output):
            print(path)
    else:
        for cell in cells:
            run(
                cell,
                told.track,
                methods=told.method,
                seeds=told.seeds,
                data=told.data,
                folder=told.output,
            )
