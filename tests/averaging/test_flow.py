"""Properties of flows other than values: lost steps, messages, weights, and votes in flight."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from loops import Recorded, attach, close, sgd
from offbeat import Compute, Network, simulate
from offbeat.simulate import Kill
from offbeat.strategies.base import GlobalModel, Strategy, WorkerView
from problems import flat, make_batch, make_model, make_wide, train_step, wide_step
from worlds import simulated

# -- steps that are in flight when a worker is lost ------------------------------------------------


def lose(text: str, steps: int, seen: list[list[Any]]) -> Tensor:
    """Notes the model after each step and the time at which the next one begins."""
    rank = dist.get_rank()
    model = make_wide(rank)
    optimizer = sgd(model)
    sync = attach(model, optimizer, text, min_workers=1, timeout_seconds=20.0)
    for step in range(steps):
        seen[rank].append((flat(model), sync._team.host.now()))
        wide_step(model, optimizer, rank, step)
    seen[rank].append((flat(model), sync._team.host.now()))
    sync.finish()
    return flat(model)


@pytest.mark.parametrize(
    ("text", "steps"),
    [("local:period=4", 4), ("selsync:delta=inf,max_interval=4", 4), ("selsync:delta=0.0", 1)],
)
def test_no_step_of_a_survivor_is_lost_while_a_blocking_mean_is_in_flight(
    text: str, steps: int
) -> None:
    """Worker 2 dies between launch and landing: the mean is then that of the two survivors.

    Steps count as synchronized at the landing. If it were the launch, no worker would have any to
    contribute to the next generation, and the steps of all but one worker would be lost.
    """

    def run(*faults: Any) -> tuple[list[Any], list[list[Any]]]:
        seen: list[list[Any]] = [[] for _ in range(3)]
        network = Network("100kbit/s", latency="1ms")  # a mean of 35 kB takes more than 2 s
        results = simulate(
            lambda: lose(text, steps, seen),
            workers=3,
            network=network,
            compute=Compute("10ms"),
            faults=faults,
        ).results
        return results, seen

    _, seen = run()
    (_, before), (_, after) = seen[2][steps - 1 :]
    assert after - before > 2
    results, seen = run(Kill(worker=2, at=before + 1))
    assert results[2] is None
    assert len(seen[2]) == steps, "it was waiting for the mean when it died"
    models = [copy.deepcopy(make_wide(0)) for _ in range(2)]
    for rank, model in enumerate(models):
        optimizer = sgd(model)
        for step in range(steps):
            wide_step(model, optimizer, rank, step)
    mean = sum(map(flat, models)) / 2
    for rank in range(2):
        close(seen[rank][steps][0], mean, 1e-6)
        assert torch.equal(results[rank], seen[rank][steps][0])
    assert not torch.allclose(mean, flat(models[0]), atol=1e-3), "rank 0's alone is another one"


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
