"""What a recording says, and that the strategies start their collectives alike on all workers."""

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import offbeat
from offbeat.elastic.connect import open_communicator
from offbeat.registry import parse_strategy
from offbeat.transport.communicator import Communicator
from offbeat.transport.single_process import SingleCommunicator
from problems import make_batch, make_model, train_step
from recording import Recording, Started
from transport.communicators import simulated
from transport.operations import classes
from worlds import run


def test_what_was_started_is_recorded_in_order() -> None:
    """Kind, name, bytes handed over and the moment, of every operation and of twins."""

    def work(inner: Communicator) -> Any:
        one = Recording(inner)
        twin = one.twin()
        one.sum(torch.zeros(25), what="a sum").wait()
        one.host.computed(1)
        twin.broadcast(torch.zeros(3), source=1, what="a broadcast").wait()
        twin.twin().gather(torch.zeros(2, dtype=torch.uint8), what="a gather").wait()
        if one.rank == 0:
            one.send(torch.zeros(5), destination=1, what="a message")
        if one.rank == 1:
            one.receive(torch.zeros(5), source=0, what="a message").wait()
        return [(s.kind, s.what, s.sent_bytes) for s in one.started], one.started

    results = simulated(work)
    for rank, (names, started) in enumerate(results):
        assert names == [
            ("Sum", "a sum", 100),
            ("Broadcast", "a broadcast", 12 if rank == 1 else 0),
            ("Gather", "a gather", 2),
            *[[("Send", "a message", 20)], [("Receive", "a message", 0)], []][rank],
        ]
        seconds = [one.seconds for one in started]
        assert seconds == sorted(seconds)
        assert seconds[0] == 0.0
        assert seconds[1] > 0.05, "the step was computed before it"


def test_an_operation_that_was_refused_is_recorded_too() -> None:
    """It is what one looks for."""
    one = Recording(SingleCommunicator())
    with pytest.raises(ValueError, match="no rank 1"):
        one.send(torch.zeros(5), destination=1, what="to nobody")
    assert [(s.kind, s.what) for s in one.started] == [("Send", "to nobody")]


def collectives(started: Any) -> list[tuple[str, str]]:
    collective = {kind.__name__ for kind in classes() if kind.collective}
    return [(one.kind, one.what) for one in started if one.kind in collective]


def test_recordings_show_who_leaves_the_common_order() -> None:
    """All workers start the same collectives; a message between two of them does not matter."""

    def work(inner: Communicator) -> Any:
        one = Recording(inner)
        x: list[Tensor] = [torch.zeros(4) for _ in range(3)]
        one.sum(x[0], what="first").wait()
        if one.rank == 0:
            one.send(x[1], destination=2, what="between").wait()
        if one.rank == 2:
            one.receive(x[1], source=0, what="between").wait()
        one.gather(x[2], what=f"second of rank {one.rank}" if one.rank == 1 else "second").wait()
        return collectives(one.started)

    first, second, third = simulated(work)
    assert first == third == [("Sum", "first"), ("Gather", "second")]
    assert second == [("Sum", "first"), ("Gather", "second of rank 1")]


# -- trainings ------------------------------------------------------------------------------------


class Recorded:
    """A transport that remembers what was started."""

    def __init__(self) -> None:
        self.started: list[Started] = []

    def make_communicator(self, timeout_seconds: float) -> Communicator:
        return Recording(open_communicator(None, timeout_seconds, what="a test"), self.started)


def train(rank: int, size: int, text: str) -> Any:
    """Unequal data, decisions by each worker for itself where the strategy has them."""
    model, transport = make_model(rank), Recorded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * (1 + rank))
    with offbeat.attach(model, optimizer, parse_strategy(text), group=transport):
        for step in range(12 + rank):  # who has fewer steps waits in finish()
            train_step(model, optimizer, make_batch(rank, step))
    dist.barrier()
    # The numbers in a name are those of the worker's own steps.
    return [(kind, re.sub(r"\d+", "#", what)) for kind, what in collectives(transport.started)]


@pytest.mark.sampled
@pytest.mark.filterwarnings("ignore:the workers are not alike:UserWarning")
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
    """The rule of the communicator, for the whole of a training: kinds and names, in order."""
    first, *others = run(train, text, workers=3)
    assert len(first) > 3
    for other in others:
        assert other == first
