"""Strategies that go by what has arrived, inside nodes of several workers: these agree on it."""

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import offbeat
from loops import attach, bits, close, sgd, trained
from offbeat import Compute, Network
from problems import flat, make_batch, make_model, make_wide, train_step
from workers import run
from worlds import simulated

ROWS = [
    ("async:schedule=eager,staleness=4", None),
    ("async:schedule=eager,staleness=2,outer_momentum=0.5", "int8"),
    ("streaming", None),
    ("streaming", "auto"),
    ("streaming:outer_gain=1,staleness=2", None),
    ("streaming:parts=3,outer_gain=1,staleness=3", "float32"),
]
STEPS = 12
LR = 0.05


class Slope(nn.Module):
    """A loss whose gradient is the same everywhere."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(elements, dtype=torch.float64))

    def forward(self, slope: Tensor) -> Tensor:
        return (self.weight * slope).sum()


def slope_of(rank: int, elements: int = 500) -> Tensor:
    """Another one on each rank."""
    return torch.randn(elements, generator=torch.Generator().manual_seed(rank)).double()


def eager(rank: int, size: int) -> Any:
    """Of each row: the model's bits after every step and at the end; that of slopes; landings."""
    found = []
    for text, wire in ROWS:
        model, slope = make_wide(rank), Slope(500)
        optimizer, trace = sgd(model), []
        sync = attach(model, optimizer, text, wire=wire, node_group="auto")
        for step in range(STEPS):
            time.sleep(0.002 * ((rank + step) % 3))  # messages come at other times for each
            train_step(model, optimizer, make_batch(rank, step, 8, torch.float32))
            trace.append(bits(flat(model)))
        details = dict(sync.stats.details)
        sync.finish()
        optimizer = sgd(slope, LR)
        with attach(slope, optimizer, text, wire=wire, node_group="auto") as sync:
            for _ in range(STEPS):
                optimizer.zero_grad()
                slope(slope_of(rank)).backward()
                optimizer.step()
            with sync.consensus():  # in which all count, whoever came first
                shown = slope.weight.detach().clone()
        landings = details.get("landings", 0) + details.get("merges", 0)
        found.append((trace, bits(flat(model)), shown, landings))
    return found


def in_environment(rank: int, size: int) -> Any:
    """As torchrun starts two workers on each of two nodes."""
    os.environ.update(LOCAL_RANK=str(rank % 2), LOCAL_WORLD_SIZE="2")
    return eager(rank, size)


def holds(results: list[Any]) -> None:
    """The same bits in a node after every step; the mean of all models is that of all steps."""
    slopes = torch.stack([slope_of(rank) for rank in range(4)])
    expected = -LR * STEPS * slopes.mean(0)
    for i, (text, wire) in enumerate(ROWS):
        for rank, of_rank in enumerate(results):
            trace, final, of_slope, landings = of_rank[i]
            twin = results[rank ^ 1][i]
            assert all(map(torch.equal, trace, twin[0])), (text, wire)
            assert torch.equal(final, results[0][i][1]), (text, wire)
            assert torch.equal(of_slope, results[0][i][2]), (text, wire)
            assert landings == twin[3] > 1, "they have decided alike, and not only at the end"
        traces = results[0][i][0], results[2][i][0]
        assert not all(map(torch.equal, *traces)), "nodes are apart"
        if "outer_gain=1" in text or (wire is None and "async" in text):
            close(results[0][i][2], expected, 1e-12 if wire or "async" in text else 1e-6)


def test_a_node_stays_one_whatever_arrives_when() -> None:
    """On real processes, which sleep now and then."""
    holds(run(in_environment, workers=4))


def test_so_it_does_in_the_simulator() -> None:
    """Steps vary by 30 per cent there."""
    holds(simulated(eager, workers=4, workers_per_node=2))


def virtual(text: str, wire: Any, *, nodes: bool) -> list[Tensor]:
    """The models of two nodes of two workers, or of two workers that have both's data."""

    def worker() -> list[Tensor]:
        rank = dist.get_rank()
        model = make_model(0)
        sync = attach(model, sgd(model), text, wire=wire, node_group="auto" if nodes else None)
        ranks = [rank] if nodes else [2 * rank, 2 * rank + 1]
        trace = trained(
            sync, model, [[make_batch(one, step) for one in ranks] for step in range(STEPS)]
        )
        sync.finish()
        return [*trace, flat(model)]

    several = {"workers_per_node": 2, "inside": "100Gbit/s", "inside_latency": "1us"}
    network = Network("1Mbit/s", latency="3ms", **(several if nodes else {}))
    found = offbeat.simulate(
        worker, workers=4 if nodes else 2, network=network, compute=Compute("5ms")
    ).results
    return [one for of_worker in found[:: 2 if nodes else 1] for one in of_worker]


@pytest.mark.parametrize(("text", "wire"), [row for row in ROWS if row[1] != "auto"])
def test_it_trains_as_one_worker_with_the_data_of_all(text: str, wire: Any) -> None:
    """Step by step, where messages take as long: whole steps of it."""
    of_nodes, of_workers = (virtual(text, wire, nodes=nodes) for nodes in (True, False))
    for one, other in zip(of_nodes, of_workers, strict=True):
        close(one, other, 1e-11)
