"""The command line of the race: ``python -m benchmarks race …``.

Without one of the options below it runs the chosen cells; runs that are in their files already are
not run again. ``--list`` shows the cells. ``--slowdown`` prints how many times the ideal network's
time every method took. ``--steady`` goes with it and divides by one step time for all runs of the
ideal network; ``--against`` goes with it and prints how much less the default's slowdown is than
another method's under the same seeds. ``--simulated`` runs the race in virtual time.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import DATA, RESULTS
from benchmarks.race import real, simulated, tables
from benchmarks.race.settings import TRACKS, select_cells, select_methods


def main(argv: Sequence[str]) -> None:
    """Run ``python -m benchmarks race`` with these arguments."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        cells = select_cells([text for text in options.cells.split(",") if text])
        for cell in cells:
            select_methods(cell, options.method)
    except ValueError as error:
        parser.error(str(error))
    if options.simulated:
        print(simulated.run_all(options.workload, options.output))
    elif options.list:
        for cell in cells:
            print(f"{cell.name:14} {len(cell.methods)} methods, {cell.seeds} seeds")
    elif options.against or options.late or options.steady:
        print(_table(parser, options, [cell.name for cell in cells]))
    else:
        for cell in cells:
            real.run(
                cell,
                options.track,
                methods=options.method,
                seeds=options.seeds,
                data=options.data,
                folder=options.output,
            )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks race",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--track", choices=TRACKS, default="defaults")
    add("--cells", default="", help="names of cells or words in them, with commas; default all")
    add("--method", action="append", default=[], help="only methods that start with this")
    add("--seeds", type=int, help="largest number of seeds")
    add("--data", type=Path, default=DATA, help="directory of cifar10/ and mnist/")
    add("--output", type=Path, default=RESULTS, help="directory of the results")
    add("--list", action="store_true", help="only show the cells")
    add(
        *("--slowdown", "--late"),
        dest="late",
        metavar="SECONDS",
        help="only print the slowdown against the ideal network after 10,20,30 seconds of it",
    )
    add("--steady", action="store_true", help="--slowdown: one step time for all ideal runs")
    add("--against", help="--slowdown: start of the other method's name")
    add("--simulated", action="store_true", help="in virtual time instead")
    add("--workload", choices=("mlp", "cnn"), default="mlp", help="workload of --simulated")
    return parser


def _table(parser: argparse.ArgumentParser, options: argparse.Namespace, cells: list[str]) -> str:
    """Return the table of ``--slowdown``; exit with a message if the options do not fit."""
    if not options.late:
        parser.error(f"{'--against' if options.against else '--steady'} goes with --slowdown")
    seconds = [float(at) for at in options.late.split(",")]
    if options.against:
        if options.steady or options.seeds or options.cells:
            parser.error("--against shows all cells: no --steady, --seeds or --cells with it")
        text = tables.against(options.output, seconds, options.against, options.track)
        if not text:
            parser.error(f"no workload has three runs of the default and of {options.against!r}")
        return text
    text = tables.every_method(
        options.output,
        seconds,
        options.track,
        steady=options.steady,
        seeds=options.seeds,
        only=cells,
    )
    if not text:
        span = f"{min(seconds):g} to {max(seconds):g} s"
        parser.error(f"in none of these cells does the ideal network have evaluations from {span}")
    return text
