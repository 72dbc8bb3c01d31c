"""Recordings show that all workers start the same collectives in the same order."""

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

import offbeat
from offbeat.elastic.connect import open_communicator
from offbeat.registry import parse_strategy
from offbeat.transport.communicator import Communicator
from problems import make_batch, make_model, train_step
from recording import Recording, Started
from transport.communicators import simulated
from transport.operations import classes
from worlds import run


def test_operations_are_recorded_in_order() -> None:
    """Kind, name, payload and time of every operation, including those of twins."""

    def work(inner: Communicator) -> Any:
        recording = Recording(inner)
        twin = recording.twin()
        recording.sum(torch.zeros(25), what="a sum").wait()
        recording.host.computed(1)
        twin.broadcast(torch.zeros(3), source=1, what="a broadcast").wait()
        twin.twin().gather(torch.zeros(2, dtype=torch.uint8), what="a gather").wait()
        return [(s.kind, s.what, s.sent_bytes) for s in recording.started], recording.started

    for rank, (names, started) in enumerate(simulated(work)):
        assert names == [
            ("Sum", "a sum", 100),
            ("Broadcast", "a broadcast", 12 if rank == 1 else 0),
            ("Gather", "a gather", 2),
        ]
        seconds = [one.seconds for one in started]
        assert seconds == sorted(seconds)
        assert seconds[0] == 0.0
        assert seconds[1] > 0.05, "the step was computed before it"


def collectives(started: Any) -> list[tuple[str, str]]:
    collective = {kind.__name__ for kind in classes() if kind.collective}
    return [(one.kind, one.what) for one in started if one.kind in collective]


class Recorded:
    """A transport that records operations."""

    def __init__(self) -> None:
        self.started: list[Started] = []

    def make_communicator(self, timeout_seconds: float) -> Communicator:
        return Recording(open_communicator(None, timeout_seconds, what="a test"), self.started)


def train(rank: int, size: int, text: str) -> Any:
    """Train on unequal data. Some strategies let each worker decide by itself."""
    model, transport = make_model(rank), Recorded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * (1 + rank))
    with offbeat.attach(model, optimizer, parse_strategy(text), group=transport):
        for step in range(12 + rank):  # workers with fewer steps wait in finish()
            train_step(model, optimizer, make_batch(rank, step))
    dist.barrier()
    # A name contains the number of a local step.
    return [(kind, re.sub(r"\d+", "#", what)) for kind, what in collectives(transport.started)]


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
