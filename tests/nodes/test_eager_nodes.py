"""Eager schedules in nodes: the workers of a node agree on which messages have arrived."""

import time
from typing import Any

import pytest
import torch

from loops import attach, bits, error_of, sgd
from problems import flat, make_batch, make_model, make_wide, train_step
from replays import recorded, require_replayed
from workers import run
from worlds import simulated

ROWS = [
    ("async:schedule=eager,staleness=4", None),
    ("async:schedule=eager,staleness=2,outer_momentum=0.5", "int8"),
    ("streaming:staleness=8", None),  # the bound forces a landing within ``STEPS``
    ("streaming:parts=3,outer_gain=1,staleness=3", "float32"),
]
REPLAYED = {"async:schedule=eager,staleness=4": 1, "streaming:parts=3,outer_gain=1,staleness=3": 3}
"""With an exact wire: the number of parts."""
STEPS = 12


def eager(rank: int, size: int) -> Any:
    """Return, for each row, the bits of the model after every step and the landings; and events."""
    found = []
    for text, wire in ROWS:
        model = make_wide(rank)
        optimizer, trace = sgd(model), []
        sync = attach(model, optimizer, text, wire=wire, node_group="auto")
        for step in range(STEPS):
            time.sleep(0.002 * ((rank + step) % 3))  # messages arrive at different times
            train_step(model, optimizer, make_batch(rank, step, 8, torch.float32))
            trace.append(bits(flat(model)))
        landings = sync.stats.details["landings"]
        sync.finish()
        found.append((trace, bits(flat(model)), landings))
    steps = STEPS - rank // 2  # the second node waits for the first one
    return found, [recorded(rank, text, make_model(rank), steps) for text in REPLAYED]


def require_equal_nodes(results: list[Any]) -> None:
    """Check equal bits inside each node after every step, and the models against the events."""
    for i, row in enumerate(ROWS):
        for rank, (of_rank, _) in enumerate(results):
            trace, final, landings = of_rank[i]
            duplicate = results[rank ^ 1][0][i]
            assert all(map(torch.equal, trace, duplicate[0])), row
            assert torch.equal(final, results[0][0][i][1]), row
            assert landings == duplicate[2] > 0, row
        traces = results[0][0][i][0], results[2][0][i][0]
        assert not all(map(torch.equal, *traces)), "different nodes have different models"
    for i, parts in enumerate(REPLAYED.values()):
        require_replayed([replayed[i] for _, replayed in results], parts, rows=False)


@pytest.mark.parametrize("world", [run, simulated])
def test_workers_of_a_node_stay_equal(world: Any) -> None:
    """Simulated steps have a jitter of 30 % in their duration."""
    require_equal_nodes(world(eager, workers=4, workers_per_node=2))


def poisoned(rank: int, size: int) -> Any:
    """Train with NaN in the share of the second process of the second node, and nowhere else."""
    model = make_wide(rank)
    model.unused = torch.nn.Parameter(torch.zeros(64))
    optimizer = sgd(model)
    sync = attach(model, optimizer, "streaming:staleness=8", node_group="auto")

    def train() -> None:
        for step in range(3 * STEPS):
            if step == 4 and rank >= 2:
                model.unused.data[-1] = torch.nan
            train_step(model, optimizer, make_batch(rank, step, 8, torch.float32))
        sync.finish()

    found = error_of(train)
    sync.detach()
    return found


def test_nan_in_one_share_is_found_by_all_processes() -> None:
    for kinds, text in simulated(poisoned, workers=4, workers_per_node=2):
        assert "OffbeatError" in kinds
        assert "rank 1 would contribute NaN" in text
