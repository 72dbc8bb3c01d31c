"""Run the race on real processes over shaped links."""

import contextlib
import importlib.util
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.harness import DATA, RESULTS
from benchmarks.race.settings import TRACKS, Cell, path_of, select_methods
from offbeat.lab.compare import compare
from offbeat.lab.events import Evaluation, Event
from offbeat.lab.launch.runners import Runner
from offbeat.lab.methods.peer import Peer
from offbeat.lab.methods.registry import parse_method
from offbeat.lab.results import Result, read_results


def installed(methods: Sequence[str]) -> list[str]:
    """Return the methods whose library is installed, and print the others."""
    found = []
    for text in methods:
        method = parse_method(text.split()[0])
        if isinstance(method, Peer) and importlib.util.find_spec(method.package) is None:
            print(f"{text} left out: {method.package} is not installed (pip install '.[peers]')")
        else:
            found.append(text)
    return found


def run(
    cell: Cell,
    track: str,
    *,
    methods: Sequence[str] = (),
    seeds: int | None = None,
    data: Path = DATA,
    folder: Path = RESULTS,
    runner: Runner | None = None,
) -> list[Result]:
    """Run what is missing of a cell; return the results of the chosen methods and seeds.

    Args:
        cell: Cell to run.
        track: Key of ``TRACKS``.
        methods: Prefixes of the cell's methods to run; without prefixes all run.
        seeds: Largest number of seeds; None for all of the cell.
        data: Directory of all data sets.
        folder: Directory of the results.
        runner: Where to run, instead of the cell's links.
    """
    texts = installed(select_methods(cell, methods))
    count = cell.seeds if seeds is None else min(seeds, cell.seeds)
    if 1.0 in TRACKS[track]:
        _copy_from_defaults(cell, track, texts, count, folder)
    with contextlib.nullcontext(runner) if runner is not None else cell.runner() as where:
        return compare(
            cell.job(data),
            texts,
            seeds=count,
            lr_scales=TRACKS[track],
            runner=where,
            output=path_of(cell, track, folder),
            on_start=lambda one: print(f"{cell.name}  {one.label}  seed {one.seed}", flush=True),
            on_event=_print_evaluation,
            command=_command(cell, track),
        )


def _command(cell: Cell, track: str) -> str:
    return f"python -m benchmarks race --track {track} --cells {cell.name}"


def _copy_from_defaults(
    cell: Cell, track: str, texts: Sequence[str], seeds: int, folder: Path
) -> None:
    """Copy runs at the recipe's own rate from the track ``defaults``, so that none runs twice."""
    source, target = path_of(cell, "defaults", folder), path_of(cell, track, folder)
    if not source.exists():
        return
    known = {(one.label, one.job.seed) for one in (read_results(target) if target.exists() else ())}
    for one in read_results(source):
        wanted = one.label in texts and one.job.seed < seeds
        if wanted and (one.label, one.job.seed) not in known:
            copy = replace(one, lr_scales=TRACKS[track], command=_command(cell, track))
            with target.open("a", encoding="utf-8") as file:
                file.write(json.dumps(copy.to_dict()) + "\n")


def _print_evaluation(event: Event) -> None:
    if isinstance(event, Evaluation):
        print(f"  step {event.step}  {event.seconds:.1f} s  {event.metric:.4f}", flush=True)
