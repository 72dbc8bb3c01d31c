"""Leased data and a slow worker: what the steps of a worker count.

This is the section "Unequal numbers of steps" of docs/strategies.md.
"""

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import offbeat
from offbeat import Compute, Network, simulate
from offbeat.data import LeasedLoader, LeasedSampler
from offbeat_lab.baselines import STRATEGIES

WORKERS, BATCHES, LR = 4, 140, 0.01
OWN_SPEED = [
    "streaming:outer_gain=1",
    "async:schedule=eager",
    "downpour",
    "easgd:period=2",
]
SSP = "ssp:staleness=5"


def train(strategy: str) -> Any:
    """Return this worker's steps and the final model, divided by the learning rate.

    Worker w has the constant gradient e_w, the unit vector. So element w of the model shows how
    much the steps of worker w count.
    """
    model = torch.nn.Linear(1, WORKERS, bias=False).double()
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    sync = offbeat.attach(model, optimizer, offbeat.parse_strategy(strategy, STRATEGIES))
    dataset = TensorDataset(torch.zeros(BATCHES))
    sampler = LeasedSampler(dataset, 1, sync=sync)
    for _ in LeasedLoader(DataLoader(dataset, batch_sampler=sampler)):
        optimizer.zero_grad()
        model.weight[sync.rank].sum().backward()
        optimizer.step()
    sync.finish()
    return sync.step, (model.weight.detach().flatten() / -LR).tolist()


def run(strategy: str) -> tuple[list[int], list[float]]:
    """Train on four workers, of which the last one has half the speed.

    Returns:
        The steps of each worker, and the final model divided by the learning rate.
    """
    results = simulate(
        lambda: train(strategy),
        workers=WORKERS,
        network=Network("1Gbit/s", latency="100us"),
        compute=Compute("10ms", slowdown={3: 2.0}),
    ).results
    assert sum(steps for steps, _ in results) == BATCHES
    return [steps for steps, _ in results], results[0][1]


@pytest.mark.parametrize("strategy", OWN_SPEED)
def test_a_slow_worker_takes_half_as_many_steps(strategy: str) -> None:
    """The model is the sum of all updates, divided by N. So each sample counts the same.

    The last mean of ``async`` is that of the workers with new steps, and so are the means of the
    parts that are sent after the last step. EASGD adds no updates.
    """
    steps, moved = run(strategy)
    assert steps[3] == pytest.approx(BATCHES * 0.5 / 3.5, abs=4)
    assert max(steps[:3]) - min(steps[:3]) <= 4
    if "easgd" not in strategy:
        exact = 1e-6 if "downpour" in strategy else 0.03
        assert moved == pytest.approx([one / WORKERS for one in steps], rel=exact)


def test_ssp_ends_in_lock_step() -> None:
    steps, moved = run(SSP)
    assert 3 <= max(steps) - min(steps) <= 5 + 4
    assert moved == pytest.approx([one / WORKERS for one in steps], rel=1e-6)
