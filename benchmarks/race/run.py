"""Run the comparisons of ``studies``: ``python -m benchmarks.race.run [WORD …]``.

The words choose cells, as in ``headline cnn`` or ``headline-cnn-50Mbit``. Runs that are in the
results already are not repeated, so the same command continues after an interruption.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.harness import DATA, RESULTS
from benchmarks.race.studies import CELLS, Cell, select
from offbeat_lab.compare import compare
from offbeat_lab.launch.runners import Runner
from offbeat_lab.results import Result, read_results

NETWORK = ("bandwidth", "latency", "workers_per_node")
"""Attributes of a cell that do not change the ideal."""


def run(cell: Cell, data: Path = DATA, folder: Path = RESULTS) -> list[Result]:
    """Run what is missing of a cell, and return all its results."""
    with cell.runner() as runner:
        copy_ideal(cell, runner, folder)
        return compare(
            cell.job(data),
            cell.methods(folder),
            seeds=cell.seeds,
            tune=cell.trials,
            runner=runner,
            output=cell.path(folder),
            on_start=lambda job: print(f"{cell.name}  {job.label}  seed {job.seed}", flush=True),
            on_event=lambda event: None,
            command=f"python -m benchmarks.race.run {cell.name}",
        )


def copy_ideal(cell: Cell, runner: Runner, folder: Path) -> None:
    """Copy the ideal's runs that a cell lacks from the same cell on other links or without nodes.

    These runs do not communicate, so they are the same on every network.
    """
    found: dict[str, Result] = {}
    for other in CELLS:
        network = {name: getattr(cell, name) for name in NETWORK}
        if replace(other, **network) == cell != other:
            found |= _ideals(other.path(folder))
    known = _ideals(cell.path(folder))
    if not found.keys() - known.keys():
        return
    with cell.path(folder).open("a", encoding="utf-8") as file:
        for key, result in found.items():
            if key not in known:
                job = replace(result.job, workers_per_node=cell.workers_per_node)
                copied = replace(result, link=str(runner), job=job)
                file.write(json.dumps(copied.to_dict()) + "\n")


def _ideals(path: Path) -> dict[str, Result]:
    """Return the ideal's runs in a file of results, by label, seed and trial."""
    results = read_results(path, trials=True) if path.exists() else []
    return {f"{one.label} {one.job.seed} {one.trial}": one for one in results if one.is_ideal}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the chosen cells one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="words in the names of cells; default all cells")
    parser.add_argument("--data", type=Path, default=DATA, help="directory of cifar10/")
    parser.add_argument("--output", type=Path, default=RESULTS, help="directory of the results")
    parser.add_argument("--list", action="store_true", help="only show the cells")
    options = parser.parse_args(argv)
    try:
        cells = select(options.words)
    except ValueError as error:
        parser.error(str(error))
    for cell in cells:
        if options.list:
            print(f"{cell.name:32} {cell.seeds} seeds")
        else:
            run(cell, options.data, options.output)


if __name__ == "__main__":
    main()
