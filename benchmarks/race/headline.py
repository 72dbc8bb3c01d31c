"""The headline comparisons: every method tuned alike, five seeds, in virtual time.

    python -m benchmarks.race.headline [CELL …] --output runs/headline

A cell is a workload and a link of ``settings``, such as ``lm-wan``. Each cell is one ``offbeat
compare --tune``, which continues where it was stopped. A cell takes hours.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import DATA, ROOT
from benchmarks.race.settings import CELLS, TINY, Cell, select_cells

METHODS = ("ideal", "streaming", "diloco:fragments=4,overlap=4", "local", "bsp")
TRIALS, SEEDS, LATENCY = 8, 5, "1ms"


def cells(texts: Sequence[str]) -> list[Cell]:
    """Return the chosen cells on constant links with equal workers; without texts all of these."""
    chosen = select_cells(texts) if texts else list(CELLS)
    return [one for one in chosen if one.later is None and not one.jitter and one.slow is None]


def arguments(cell: Cell, output: Path, data: Path = DATA) -> list[str]:
    """Return the arguments of ``offbeat`` that run the cell, or continue it."""
    job = cell.job(data)
    found = ["compare", job.recipe, "--simulate", "--workers", str(cell.workers)]
    found += ["--epochs", f"{job.epochs:g}", "--step-time", f"{job.step_seconds}s"]
    found += ["--bandwidth", cell.bandwidth or "1Gbit/s", "--latency", LATENCY]
    found += ["--tune", str(TRIALS), "--seeds", str(SEEDS), "--output", str(output / cell.name)]
    if job.data is not None:
        found += ["--data", job.data]
    for method in METHODS:
        found += ["--strategy", method]
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Run the chosen cells one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cells", nargs="*", help=f"for example {TINY.name} or lm-wan; default: all")
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "headline")
    options = parser.parse_args(argv)
    for cell in cells(options.cells):
        command = arguments(cell, options.output)
        print(f"{cell.name}: offbeat {' '.join(command)}", flush=True)
        subprocess.run([sys.executable, "-m", "offbeat.cli", *command], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
