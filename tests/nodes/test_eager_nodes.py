"""Eager schedules in nodes: the workers of a node agree on which messages have arrived."""

import os
import time
from typing import Any

import torch

from loops import attach, bits, close, error_of, sgd
from problems import flat, loss_of, make_batch, make_model, make_wide, train_step
from replays import LR, logged, part_of_each_number, replay, settle
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
            time.sleep(
                0.002 * ((rank + step) % 3)
            )  # messages arrive at different times on each worker
            train_step(model, optimizer, make_batch(rank, step, 8, torch.float32))
            trace.append(bits(flat(model)))
        landings = sync.stats.details["landings"]
        sync.finish()
        found.append((trace, bits(flat(model)), landings))
    return found, [with_events(rank, text) for text in REPLAYED]


def with_events(rank: int, text: str) -> Any:
    """Return the model before each step and after the last landing, the events, and a consensus."""
    model = make_model(rank)
    optimizer, trace = sgd(model, LR), []
    sync = attach(model, optimizer, text, wire="float32", node_group="auto")
    events = logged(sync._iteration.flow)
    for step in range(STEPS - rank // 2):  # the second node waits for the first one
        if step:
            trace.append(flat(model))
        time.sleep(0.002 * ((rank + step) % 3))
        loss = loss_of(model, make_batch(rank, step))
        optimizer.zero_grad()
        loss.backward()
        events.append(("step", 0, 0.0))
        optimizer.step()
    with sync.consensus():
        shown = flat(model)
    settle(sync)
    trace.append(flat(model))
    sync.detach()
    return trace, events, shown


def in_environment(rank: int, size: int) -> Any:
    """Set the environment of torchrun with two workers on each of two nodes."""
    os.environ.update(LOCAL_RANK=str(rank % 2), LOCAL_WORLD_SIZE="2")
    return eager(rank, size)


def require_equal_nodes(results: list[Any]) -> None:
    """Check equal bits inside each node after every step, and the models against the events."""
    for i, row in enumerate(ROWS):
        for rank, (of_rank, _) in enumerate(results):
            trace, final, landings = of_rank[i]
            twin = results[rank ^ 1][0][i]
            assert all(map(torch.equal, trace, twin[0])), row
            assert torch.equal(final, results[0][0][i][1]), row
            assert landings == twin[2] > 0, (
                "the workers of a node land the same parts during training"
            )
        traces = results[0][0][i][0], results[2][0][i][0]
        assert not all(map(torch.equal, *traces)), "different nodes have different models"
    for i, (text, parts) in enumerate(REPLAYED.items()):
        of_ranks = [replayed[i] for _, replayed in results]
        events = [events for _, events, _ in of_ranks]
        assert events[0] == events[1], text
        assert events[2] == events[3], text
        expected = replay(part_of_each_number(parts, rows=False), [events[0], events[2]])
        for rank, (trace, _, shown) in enumerate(of_ranks):
            close(torch.stack(trace), torch.stack(expected[rank // 2]))
            assert torch.equal(shown, of_ranks[0][2]), text


def test_workers_of_a_node_stay_equal_on_real_processes() -> None:
    require_equal_nodes(run(in_environment, workers=4))


def test_workers_of_a_node_stay_equal_in_the_simulator() -> None:
    """With a jitter of 30 % in the duration of steps."""
    require_equal_nodes(simulated(eager, workers=4, workers_per_node=2))


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
