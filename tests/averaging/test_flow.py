"""Properties of flows other than values: messages, and votes in flight."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from loops import Recorded, attach, sgd
from offbeat import Compute, Network, simulate
from offbeat.strategies.base import GlobalModel, Strategy, WorkerView
from problems import make_batch, make_model, train_step
from worlds import simulated

# -- messages --------------------------------------------------------------------------------------


class Normalised(nn.Module):
    """4,000 numbers with BatchNorm, of which ``fragments`` parts can be made."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.a, self.norm, self.b = nn.Linear(4, 500), nn.BatchNorm1d(500), nn.Linear(500, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.norm(self.a(x)).tanh())
        return out


def messages(rank: int, size: int, text: str, wire: Any) -> list[list[str]]:
    """Kinds of the operations of each step, and of ``finish``."""
    model, recorded = Normalised(rank), Recorded()
    optimizer = sgd(model)
    sync = attach(model, optimizer, text, wire=wire, group=recorded)
    seen = []
    for step in range(5):
        recorded.operations.clear()
        if step == 4:
            sync.finish()
        else:
            train_step(model, optimizer, make_batch(rank, step, dtype=torch.float32))
        seen.append([kind for kind, _, _ in recorded.operations])
    return seen


VOTES, MEAN, BUFFERS = ["gather"], ["sum"], ["sum"]
COUNTERS, LOSSY = ["maximum"], ["exchange", "gather"]


@pytest.mark.parametrize(
    ("text", "wire", "step", "end"),
    [
        # Buffers travel exactly, and counters at the end alone. The end is exact, too.
        ("local:period=1", "float32", VOTES + MEAN + BUFFERS, VOTES + BUFFERS + COUNTERS),
        ("diloco:period=1", "float32", VOTES + MEAN + BUFFERS, VOTES + BUFFERS + COUNTERS),
        ("async:staleness=2", "float32", VOTES + MEAN + BUFFERS, VOTES + BUFFERS + COUNTERS),
        ("selsync:delta=inf", "float32", VOTES, VOTES + MEAN + COUNTERS),
        ("selsync:delta=inf", "int8", VOTES, VOTES + MEAN + COUNTERS),
        ("local:period=1", "int8", VOTES + LOSSY + BUFFERS, VOTES + MEAN + COUNTERS),
        (
            "streaming:parts=1,schedule=cyclic,staleness=2",
            "float32",
            VOTES + MEAN + BUFFERS,
            VOTES + MEAN + COUNTERS,
        ),
        # The last round sends gradients of 0.
        ("bsp", "float32", VOTES + MEAN, VOTES + MEAN + BUFFERS + COUNTERS),
        ("bsp", "int8", VOTES + LOSSY, VOTES + LOSSY + BUFFERS + COUNTERS),
    ],
)
def test_a_mean_takes_as_few_messages_as_possible(
    text: str, wire: str, step: list[str], end: list[str]
) -> None:
    """Each message costs a latency."""
    for first, *others, last in simulated(messages, text, wire, workers=3):
        assert sorted(first) == sorted(step)
        assert all(sorted(one) == sorted(step) for one in others)
        assert sorted(last) == sorted([*end, "gather"]), "the comparison of the final models"


# -- when votes travel -----------------------------------------------------------------------------


class Slow(torch.optim.SGD):
    """Its step takes 20 ms of the worker's time."""

    def __init__(self, model: nn.Module, sleep: Callable[[float, str], None] | None = None) -> None:
        super().__init__(model.parameters(), lr=0.01)
        self.sleep = sleep

    def step(self, closure: Any = None) -> Any:
        if self.sleep is not None:
            self.sleep(0.02, "the optimizer")
        return super().step()


def seconds_waited(text: str, latency: str, optimizer_sleeps: bool) -> float:
    """Of ten steps of 50 ms and votes alone."""

    def worker() -> float:
        model = make_model(dist.get_rank(), torch.float32)
        optimizer = Slow(model)
        sync = attach(model, optimizer, text)
        if optimizer_sleeps:
            optimizer.sleep = sync._team.host.sleep
        for step in range(10):
            train_step(model, optimizer, make_batch(dist.get_rank(), step, dtype=torch.float32))
        seconds = float(sync.stats.wait_seconds)
        sync.detach()
        return seconds

    network = Network("1Gbit/s", latency=latency)
    return max(simulate(worker, workers=2, network=network, compute=Compute("50ms")).results)


def test_votes_that_travel_during_the_optimizer_step_are_not_waited_for() -> None:
    text = "selsync:delta=inf"
    assert seconds_waited(text, "5ms", optimizer_sleeps=True) == 0
    assert seconds_waited(text, "5ms", optimizer_sleeps=False) > 10 * 0.004


# -- the bound on the staleness --------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, repr=False)
class Reluctant(Strategy):
    """Never requests a round."""

    def averages(self) -> GlobalModel:
        return GlobalModel(lands="arrived", bound=3)

    def due(self, worker: WorkerView) -> bool:
        return False


def run_ahead(rank: int, size: int) -> tuple[dict[int, int], int]:
    model = make_model(seed=rank)
    optimizer = sgd(model)
    with attach(model, optimizer, Reluctant()) as sync:
        for step in range(10):
            train_step(model, optimizer, make_batch(rank, step))
        details = sync.stats.details
        return dict(details["staleness_histogram"]), details["landings"]


def test_a_worker_at_its_bound_requests_a_round() -> None:
    """Launches after steps 3, 6 and 9, though the strategy wants none; alone there are none."""
    for result in simulated(run_ahead, workers=2):
        assert result == ({1: 4, 2: 3, 3: 3}, 3)
    ((histogram, landings),) = simulated(run_ahead, workers=1)
    assert (histogram, landings) == ({}, 0)
