"""The papers' figures at small scale: ``python -m benchmarks.papers [--seeds N] NAME …``.

Each name is that of a module, and ``speedup`` has variants; ``all`` stands for all names.
The results are written to ``results/papers-NAME.json``. A study that was stopped continues with the
runs in ``results/papers-*.jsonl``. Without a name, docs/reproduction.md is made from all results.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.papers import reproduction
from benchmarks.papers.runs import save

NAMES = (
    *("speedup", "speedup-long", "discrepancy", "distances", "exponents"),
    *("regret", "convergence", "noniid", "delta", "choices", "curvature", "densities"),
    *("gradients", "costs", "orders", "transformer"),
)
"""Names of modules, and after a hyphen a variant of their study."""


def main(argv: Sequence[str]) -> None:
    """Run ``python -m benchmarks.papers`` with these arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.papers",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("names", nargs="*", help=f"all, or some of {', '.join(NAMES)}")
    parser.add_argument("--seeds", type=int, help="number of seeds; default: as on the page")
    given = parser.parse_args(argv)
    unknown = set(given.names) - {"all", *NAMES}
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    torch.set_num_threads(1)
    for name in NAMES if "all" in given.names else given.names:
        study, _, variant = name.partition("-")
        module = importlib.import_module(f"benchmarks.papers.{study}")
        options: dict[str, Any] = {"variant": variant} if variant else {}
        if given.seeds is not None:
            options["seeds"] = given.seeds
        data = module.measure(**options)
        save(name, data)
        if not variant and hasattr(module, "draw"):
            module.draw(data)
    if not given.names:
        reproduction.PAGE.write_text(reproduction.render())
        print(reproduction.PAGE)


if __name__ == "__main__":
    main(sys.argv[1:])
