"""Workers that are lost when the last epoch has ended: their samples are in the final model."""

import math
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
from offbeat.data.leasing.access import synced_step_of
from offbeat.simulate import Join, Kill, Simulation
from offbeat.synchronizer import has_joined

SAMPLES, EPOCHS, WORKERS = 64, 2, 4
TIMES = 24
LEAST = 0.01
"""A number of the model above this is a sample that was trained on."""


class Uses(nn.Module):
    """One number for each sample of each epoch. A step adds 1 to the numbers of its batch.

    A mean over N workers divides that by N, so a number is above 0 if the model has the sample.
    """

    def __init__(self) -> None:
        super().__init__()
        self.uses = nn.Parameter(torch.zeros(EPOCHS, SAMPLES))

    def forward(self, epoch: int, batch: Tensor) -> Tensor:
        return -self.uses[epoch, batch].sum()


def train(
    strategy: str, state: Any = None, record: Any = None, most: float = math.inf
) -> dict[str, Any]:
    """Train on leased data. Returns the times of the ends of training, and what the model lacks.

    Args:
        strategy: Strategy as text.
        state: Result of ``Synchronizer.state_dict`` to load, except by workers that join.
        record: List that receives, for each step, the worker's number, the number of local steps
            that the other workers may lack, and the number of steps before the restart.
        most: Number of steps after which worker 0 leaves its loop.
    """
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
    if state is not None and not has_joined(sync):
        sync.load_state_dict(state)
    data = TensorDataset(torch.arange(SAMPLES))
    sampler = LeasedSampler(data, 4, sync=sync)
    loader = LeasedLoader(DataLoader(data, batch_sampler=sampler))

    def step(batch: Tensor) -> None:
        model([*sampler._uses][-1].epoch, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        if record is not None:
            lacking = sync.step - synced_step_of(sync)
            record.append((sync._team.identity, lacking, sync.step - sync._worker.step))

    if state is not None and not has_joined(sync):
        sampler.load_state_dict({**vars(sampler._settings), "epoch": 1, "left": {}})
    for epoch in range(sampler.epoch, EPOCHS):
        sampler.set_epoch(epoch)
        for (batch,) in loader:
            step(batch)
            if sync.rank == 0 and sync.step >= most:
                break
    trained = sync._team.host.now()
    for (batch,) in loader.leftovers():
        step(batch)
    sync.finish()
    state = sync.state_dict()
    missing = int((model.uses <= LEAST).sum())
    return {"trained": trained, "ended": sync._team.host.now(), "missing": missing, "state": state}


def run(strategy: str, *faults: Any, **options: Any) -> Simulation:
    return simulate(
        lambda: train(strategy, **options),
        workers=WORKERS,
        network=Network("100Mbit/s", latency="5ms"),
        compute=Compute("10ms", jitter=0.1),
        faults=faults,
    )


STRATEGIES = ["async:staleness=4", "local:period=4", "selsync:delta=0.05", "streaming", "bsp"]


@pytest.mark.parametrize("strategy", some(STRATEGIES, 0, 1))
def test_a_worker_may_be_lost_at_any_time_of_the_end(strategy: str) -> None:
    """Killed from 0.1 s before the end of the epochs to the end of ``finish``."""
    undisturbed = run(strategy).results
    assert [each["missing"] for each in undisturbed] == [0] * WORKERS
    start = min(each["trained"] for each in undisturbed) - 0.1
    end = max(each["ended"] for each in undisturbed)
    for number in range(TIMES):
        at = start + (end - start) * number / TIMES
        results = run(strategy, Kill(worker=2, at=at)).results
        assert [each["missing"] for each in results if each] == [0] * (WORKERS - 1), at


@pytest.mark.parametrize("strategy", some(["local:period=2", "async:staleness=4", "streaming"], 0))
def test_a_mean_that_died_with_its_only_receiver_does_not_count(strategy: str) -> None:
    """Worker 2 is killed. Worker 1 alone receives the mean in flight, and is killed soon after."""
    for number in range(24):
        at = 0.06 + 0.008 * number
        faults = Kill(worker=2, at=at, spared=(1,)), Kill(worker=1, at=at + 0.07)
        results = run(strategy, *faults).results
        assert [each["missing"] for each in results if each] == [0, 0], at


def test_a_worker_joins_after_a_restart() -> None:
    """The training continues from a checkpoint at epoch 1.

    Steps count from the checkpoint, and the worker that joins counts them as the others do. It does
    not train on epoch 0.
    """
    state = run("local:period=2").results[0]["state"]
    assert state["stats"]["steps"] == 8
    record: list[tuple[int, int, int]] = []
    results = run("local:period=2", Join(at=0.02), state=state, record=record).results
    assert [each["missing"] for each in results] == [SAMPLES] * (WORKERS + 1)  # those of epoch 0
    assert {worker for worker, _, _ in record} == {*range(WORKERS + 1)}
    assert max(lacking for _, lacking, _ in record) <= 4
    assert {before for _, _, before in record} == {8}


def test_a_chunk_that_nobody_completes_does_not_keep_the_others() -> None:
    """Worker 0 leaves the loop of the last epoch, and takes no further batch of its chunk."""
    lacks = [each["missing"] for each in run("local:period=2", most=5).results]
    assert len(set(lacks)) == 1
    assert 0 < lacks[0] <= 12
