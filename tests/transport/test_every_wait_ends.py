"""Every wait ends: one worker's links to the store, to its peers or to both fail, in any operation.

Each worker continues, or raises an error that names rank, operation and setting; none hangs, aborts
or has a wrong model.
"""

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cells import nightly
from linked import OPERATIONS, STRATEGIES, Cell, Server
from links import KINDS, TARGETS

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/net"), reason="needs addresses of Linux")


def matrix() -> list[Cell]:
    """Return all cells. The victim is the worker that joins or leaves, else each one in turn."""
    cells: list[Cell] = []
    for operation, kind, target, strategy, elastic in itertools.product(
        OPERATIONS, KINDS, TARGETS, STRATEGIES, (False, True)
    ):
        if operation == "join" and not elastic:
            continue
        victim = 2 if operation in ("join", "leave") else len(cells) % 3
        times = (0, 10, 40) if operation in ("attach", "join") else (0,)
        cells += [Cell(operation, kind, target, strategy, elastic, victim, t) for t in times]
    return cells


CELLS = matrix()
CHOSEN = [
    Cell("attach", "halve", "store", "local:period=2", False, 0, 10),
    Cell("round", "halve", "peers", "bsp", True, 1),
    Cell("round", "cut", "peers", "async:staleness=2", True, 0),
    Cell("round", "swallow", "both", "bsp", False, 1),
    Cell("save", "cut", "both", "local:period=2", False, 2),
    Cell("finish", "delay", "both", STRATEGIES[3], True, 0),
]
"""The cells that each run tests."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as server:
        yield server


@pytest.mark.parametrize(
    "cell", [*CHOSEN, *nightly([cell for cell in CELLS if cell not in CHOSEN])], ids=str
)
def test_every_worker_continues_or_raises(cell: Cell, server: Server, tmp_path: Path) -> None:
    """Long before the limit, after which a worker counts as stuck."""
    result = server.train(cell, tmp_path)
    assert result.faults() == [], result.story()
