"""Workers that are lost when the last epoch has ended: their samples are in the final model."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import offbeat
from cells import some
from loops import sgd
from offbeat import Compute, Network, simulate
from offbeat.data import LeasedLoader, LeasedSampler
from offbeat.simulate import Kill, Simulation

SAMPLES, EPOCHS, WORKERS = 64, 2, 4
TIMES = 24


class Uses(nn.Module):
    """One number for each sample of each epoch. A step adds 1 to the numbers of its batch.

    A mean over N workers divides that by N, so a number is above 0 if the model has the sample.
    """

    def __init__(self) -> None:
        super().__init__()
        self.uses = nn.Parameter(torch.zeros(EPOCHS, SAMPLES))

    def forward(self, epoch: int, batch: Tensor) -> Tensor:
        return -self.uses[epoch, batch].sum()


def train(strategy: str) -> dict[str, Any]:
    """Train on leased data. Returns the times of the ends of training, and what the model lacks."""
    model = Uses()
    optimizer = sgd(model, lr=1.0)
    sync = offbeat.attach(
        model,
        optimizer,
        offbeat.parse_strategy(strategy),
        wire="float32",
        min_workers=1,
        timeout_seconds=5.0,
    )
    data = TensorDataset(torch.arange(SAMPLES))
    sampler = LeasedSampler(data, 4, sync=sync)
    loader = LeasedLoader(DataLoader(data, batch_sampler=sampler))

    def step(batch: Tensor) -> None:
        model(sampler._uses[-1].lease.epoch, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for (batch,) in loader:
            step(batch)
    trained = sync._team.host.now()
    for (batch,) in loader.leftovers():
        step(batch)
    sync.finish()
    missing = int((model.uses <= 0.01).sum())
    return {"trained": trained, "ended": sync._team.host.now(), "missing": missing}


def run(strategy: str, *faults: Kill) -> Simulation:
    return simulate(
        lambda: train(strategy),
        workers=WORKERS,
        network=Network("100Mbit/s", latency="5ms"),
        compute=Compute("10ms", jitter=0.1),
        faults=faults,
    )


STRATEGIES = ["async:staleness=4", "local:period=4", "selsync:delta=0.05", "streaming", "bsp"]


@pytest.mark.parametrize("strategy", some(STRATEGIES, 0, 1))
def test_a_worker_may_be_lost_at_any_time_of_the_end(strategy: str) -> None:
    """Killed 0.1 s before the end of the epochs, in ``leftovers``, in ``finish``, or between."""
    undisturbed = run(strategy).results
    assert [each["missing"] for each in undisturbed] == [0] * WORKERS
    start = min(each["trained"] for each in undisturbed) - 0.1
    end = max(each["ended"] for each in undisturbed)
    for number in range(TIMES):
        at = start + (end - start) * number / TIMES
        results = run(strategy, Kill(worker=2, at=at)).results
        assert [each["missing"] for each in results if each] == [0] * (WORKERS - 1), at
