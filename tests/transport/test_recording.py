"""Recordings show that all workers start the same collectives in the same order."""

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

import offbeat
from loops import Recorded
from offbeat import parse_strategy
from offbeat_lab.baselines import STRATEGIES
from problems import make_batch, make_model, train_step
from transport.operations import classes
from worlds import run

COLLECTIVE = {kind.__name__ for kind in classes() if kind.collective}


def train(rank: int, size: int, text: str) -> Any:
    """Train on unequal data. Some strategies let each worker decide by itself."""
    model, recorded = make_model(rank), Recorded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * (1 + rank))
    with offbeat.attach(model, optimizer, parse_strategy(text, STRATEGIES), group=recorded):
        for step in range(12 + rank):  # workers with fewer steps wait in finish()
            train_step(model, optimizer, make_batch(rank, step))
    dist.barrier()
    # A name contains the number of a local step.
    started = [(kind, what) for kind, what, _ in recorded.operations if kind in COLLECTIVE]
    return [(kind, re.sub(r"\d+", "#", what)) for kind, what in started]


@pytest.mark.sampled
@pytest.mark.filterwarnings("ignore:the workers differ:UserWarning")
@pytest.mark.parametrize(
    "text",
    [
        "bsp",
        "local:period=3",
        "selsync:delta=0.05,max_interval=4",
        "selsync:delta=0.05,flags=deferred",
        "async:staleness=4",
        "fedavg:period=4,fraction=0.6",
        "diloco:period=4,fragments=2,overlap=1",
        "ssp:staleness=2",
        "easgd:period=2",
        "downpour",
    ],
)
def test_all_workers_start_the_same_collectives(text: str) -> None:
    """A whole training starts the same kinds and names in the same order."""
    first, *others = run(train, text, workers=3)
    assert len(first) > 3
    for other in others:
        assert other == first
