"""Run the comparisons of ``studies``: ``python -m benchmarks.race.run [WORD …]``.

The words choose cells, as in ``headline cnn`` or ``headline-cnn-50Mbit``. Runs that are in the
results already are not repeated, so the same command continues after an interruption.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import DATA, RESULTS
from benchmarks.race.studies import Cell, select
from offbeat_lab.compare import compare
from offbeat_lab.results import Result


def run(cell: Cell, data: Path = DATA, folder: Path = RESULTS) -> list[Result]:
    """Run what is missing of a cell, and return all its results."""
    with cell.runner() as runner:
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
