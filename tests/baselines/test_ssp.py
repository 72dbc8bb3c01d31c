"""SSP: the updates that a cache contains, its staleness bound, and BSP."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import offbeat
from cells import nightly
from loops import close, start
from offbeat import Compute, Network, simulate
from offbeat_lab import SSP, Downpour
from problems import bsp_reference, flat, make_batch, train_step
from worlds import run

STEP = 0.01


def train(rank: int, size: int, strategy: SSP, kind: str, steps: Sequence[int]) -> dict[str, Any]:
    model, optimizer, sync = start(rank, strategy, kind)
    trace = []
    for step in range(steps[rank]):
        train_step(model, optimizer, make_batch(rank, step))
        trace.append(flat(model))
    stats = copy.deepcopy(sync.stats)
    sync.finish()
    return {"trace": trace, "end": flat(model), "stats": stats}


# -- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sgd", "momentum"])
def test_staleness_0_with_linear_optimizers_is_bsp(kind: str) -> None:
    """The mean of the updates is the update of the mean gradient; momentum and decay are linear."""
    want = bsp_reference(3, kind, 11)
    for result in run(train, SSP(staleness=0), kind, [11] * 3, workers=3):
        for got, expected in zip(result["trace"], want, strict=True):
            close(got, expected)
        close(result["end"], want[-1])
        assert result["stats"].syncs == result["stats"].details["pulls"] == 11


# -- the bound ------------------------------------------------------------------------------------


LOOKS = (2, 4, 8, 5)
"""The step of each worker that is followed by a consensus."""


def marks(rank: int, steps: Sequence[int], strategy: SSP, looks: Sequence[int]) -> list[Tensor]:
    """The model of a worker before each step: 1 for each update of each worker that it contains.

    The update of step t of worker n is 1 at place (n, t).
    """
    size, most = len(steps), max(steps)
    model = nn.Module()
    model.x = nn.Parameter(torch.zeros(size, most, dtype=torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), lr=float(size))
    sync = offbeat.attach(model, optimizer, strategy)
    read = []
    for step in range(steps[rank]):
        read.append(model.x.detach().clone())
        model.x.grad = torch.zeros_like(model.x)
        model.x.grad[rank, step] = -1.0
        optimizer.step()
        if looks and step == looks[rank]:
            with sync.consensus():
                pass
    sync.finish()
    assert (model.x.sum(1) == torch.tensor(steps)).all(), "the end contains each update once"
    return read


@pytest.mark.parametrize("looks", [(), LOOKS], ids=["", "consensus"])
@pytest.mark.parametrize("staleness", [0, *nightly([1, 2]), 7])
@pytest.mark.parametrize(
    "bandwidth", ["1Gbit/s", pytest.param("1Mbit/s", marks=pytest.mark.nightly), "200kbit/s"]
)
def test_a_cache_contains_all_updates_up_to_the_bound(
    bandwidth: str, staleness: int, looks: tuple[int, ...]
) -> None:
    """At clock c it contains all updates of clocks ≤ c − s − 1, and its own, each exactly once.

    Clocks of workers that wait for a consensus do not count, until it is over.
    """
    steps, late = [18, 15, 18, 9], {1: 2.5}
    strategy = SSP(staleness=staleness)
    results = simulate(
        lambda: marks(dist.get_rank(), steps, strategy, looks),
        workers=4,
        network=Network(bandwidth, latency="1ms"),
        compute=Compute("10ms", jitter=0.3, slowdown=late),
        seed=5,
    ).results
    behind = set()
    for rank, reads in enumerate(results):
        for clock, read in enumerate(reads):
            assert set(read.unique().tolist()) <= {0.0, 1.0}
            assert read[rank, :clock].all()
            assert not read[rank, clock:].any()
            for other in range(4):
                if looks and looks[other] < clock <= looks[rank] + 1:
                    continue
                least = min(max(0, clock - staleness), steps[other])
                assert read[other, :least].all(), (rank, clock, other)
                if clock <= steps[other]:
                    behind.add(clock - int(read[other].sum()))
    assert staleness == 0 or max(behind) > 0, "some reads are stale"


# -- far from the bound ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "steps"),
    [
        (SSP(staleness=1000), 7),
        (Downpour(), 7),
    ],
    ids=str,
)
def test_no_worker_waits_far_from_the_bound(strategy: Any, steps: int) -> None:
    """A push and its answer each take slightly more than 3 steps, and no step waits for them."""
    result = simulate(
        lambda: train(dist.get_rank(), 3, strategy, "sgd", [60] * 3),
        workers=3,
        network=Network("1Gbit/s", latency="30ms"),
        compute=Compute(STEP, jitter=0.1),
    )
    for one in result.results:
        assert one["stats"].wait_seconds == 0
        pushes = one["stats"].payload_bytes / (2 * 3 * 8 + 8 * 40 * 2 / 3)
        assert pushes == pytest.approx(60 / steps, rel=0.25), (
            "updates made meanwhile leave together"
        )
