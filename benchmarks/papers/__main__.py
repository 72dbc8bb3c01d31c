"""The papers' figures at small scale: ``python -m benchmarks.papers [--seeds N] NAME …``.

Each name is that of a module, and ``speedup`` has further studies; ``all`` stands for all names.
The results are written to ``results/papers-NAME.json``. A study that was stopped continues with the
runs in ``results/papers-*.jsonl``. Without a name, docs/reproduction.md is made from all results.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.papers import (
    choices,
    convergence,
    costs,
    curvature,
    delta,
    densities,
    discrepancy,
    distances,
    exponents,
    gradients,
    noniid,
    orders,
    regret,
    reproduction,
    speedup,
    transformer,
)
from benchmarks.papers.runs import save

MEASURE: dict[str, Callable[..., dict[str, Any]]] = {
    **{name: partial(speedup.measure, name) for name in speedup.STUDIES},
    "discrepancy": discrepancy.measure,
    "distances": distances.measure,
    "exponents": exponents.measure,
    "regret": regret.measure,
    "convergence": convergence.measure,
    "noniid": noniid.measure,
    "delta": delta.measure,
    "choices": choices.measure,
    "curvature": curvature.measure,
    "densities": densities.measure,
    "gradients": gradients.measure,
    "costs": costs.measure,
    "orders": orders.measure,
    "transformer": transformer.measure,
}
"""Name → function of the number of seeds that returns the results."""
DRAW: dict[str, Callable[[dict[str, Any]], None]] = {
    "speedup": speedup.draw,
    "discrepancy": discrepancy.draw,
    "distances": distances.draw,
    "regret": regret.draw,
    "noniid": noniid.draw,
    "delta": delta.draw,
    "curvature": curvature.draw,
    "gradients": gradients.draw,
    "orders": orders.draw,
}
"""Name → function that draws a picture of the results for the page."""


def main(argv: Sequence[str]) -> None:
    """Run ``python -m benchmarks.papers`` with these arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.papers",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("names", nargs="*", help=f"all, or some of {', '.join(MEASURE)}")
    parser.add_argument("--seeds", type=int, help="number of seeds; default: as on the page")
    given = parser.parse_args(argv)
    unknown = set(given.names) - {"all", *MEASURE}
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(MEASURE)}")
    torch.set_num_threads(1)
    for name in MEASURE if "all" in given.names else given.names:
        data = MEASURE[name](**({} if given.seeds is None else {"seeds": given.seeds}))
        save(name, data)
        if name in DRAW:
            DRAW[name](data)
    if not given.names:
        reproduction.PAGE.write_text(reproduction.render())
        print(reproduction.PAGE)


if __name__ == "__main__":
    main(sys.argv[1:])
