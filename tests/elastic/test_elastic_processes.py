"""Training that continues when real workers die and join."""

import copy
import os
import signal
import time
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import offbeat
from cells import some
from loops import sgd
from offbeat.data import LeasedLoader, LeasedSampler
from offbeat.elastic import membership, views
from offbeat.errors import CommunicationError
from problems import flat, loss_of, make_batch, make_model
from workers import run

STRATEGIES = [
    "bsp",
    "local:period=3",
    "selsync:target_lssr=0.5",
    "async:staleness=4",
    "streaming",
    "diloco:period=4",
]


def store() -> Any:
    return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False)


def stumble() -> None:
    """Let this worker fail when it first begins a view."""
    real = views.open_wire

    def fail(*args: Any) -> Any:
        views.open_wire = real
        raise CommunicationError("stumbled")

    views.open_wire = fail


def train(rank: int, size: int, strategy: str, stumbles: bool = False) -> Any:
    """Rank 1 dies at step 10, then a worker joins; all take some more steps."""
    membership._STORE_SECONDS = 0.1  # between two looks at the store
    os.environ["OFFBEAT_KERNELS"] = "0"  # numba is slow to import
    kept = store()
    if rank == size:
        kept.wait(["died"])
        if stumbles:
            stumble()
    model, group = make_model(rank), offbeat.join() if rank == size else None
    optimizer = sgd(model)
    sync = offbeat.attach(
        model,
        optimizer,
        offbeat.parse_strategy(strategy),
        group=group,
        min_workers=1,
        timeout_seconds=100,
    )
    begun, more, deadline = sync.step, 8, time.monotonic() + 40
    while more:
        assert time.monotonic() < deadline, sync.stats
        if rank == 1 and sync.step == 10:
            kept.set("died", "")
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        loss_of(model, make_batch(rank, sync.step)).backward()
        optimizer.step()
        members = [n for n in range(size + 1) if n != 1]
        more -= sync.stats.details["members"] == members
        time.sleep(0.002)
    sync.finish()
    return flat(model), begun, sync.step, dict(sync.stats.details)


def check(results: list[Any], least: int = 0) -> None:
    """All end with one model and the same members; the newcomer begins at the others' step."""
    first, _, *others = results
    model, begun, steps, details = first
    assert begun == 0
    assert steps >= least + 8
    assert details["members"] == [0, 2, 3, 4]
    assert model.isfinite().all()
    for other, _, _, others_details in others:
        assert torch.equal(other, model)
        assert others_details["members"] == [0, 2, 3, 4]
    assert others[-1][1] >= least


@pytest.mark.parametrize("strategy", some(STRATEGIES, 0, 4))
def test_training_survives_a_death_and_a_join(strategy: str) -> None:
    """One worker is killed, one joins."""
    least = 10 if strategy == "bsp" else 1  # in the others, workers go apart
    check(run(train, strategy, workers=4, newcomers=1, may_die=(1,)), least)


def test_a_newcomer_may_fail_before_its_first_view_begins() -> None:
    """It enters the next view, still with nothing to contribute, long before a time-out."""
    check(run(train, "streaming", True, workers=4, newcomers=1, may_die=(1,)))


# -- what a newcomer receives ------------------------------------------------------------------

SAMPLES = 96


def states_of(model: Any, optimizer: Any, scheduler: Any, scaler: Any) -> dict[str, Any]:
    """Return copies of all states that BSP keeps equal on all workers, and of the buffers."""
    return copy.deepcopy(
        {
            "model": flat(model),
            "buffers": dict(model.named_buffers()),
            "optimizer": optimizer.state_dict()["state"],
            "lr": optimizer.param_groups[0]["lr"],
            "scheduler": scheduler.state_dict(),
            "scaler": scaler.state_dict(),
        }
    )


def train_with_everything(rank: int, size: int) -> Any:
    """Return the states after each step, the used samples by epoch, and the random state.

    A worker joins at step 6. The training ends two epochs later.
    """
    membership._STORE_SECONDS = 0.1
    os.environ["OFFBEAT_KERNELS"] = "0"
    kept = store()
    if rank == size:
        kept.wait(["joins"])
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    sync = offbeat.attach(
        model,
        optimizer,
        offbeat.BSP(),
        group=offbeat.join() if rank == size else None,
        scaler=scaler,
        min_workers=1,
        timeout_seconds=20,
    )

    def load(state: dict[str, Any]) -> None:
        scheduler.load_state_dict(state)
        optimizer.param_groups[0]["lr"] = scheduler.get_last_lr()[0]

    sync.share_state(scheduler.state_dict, load)
    sync.share_state(scaler.state_dict, scaler.load_state_dict)
    states = {sync.step: states_of(model, optimizer, scheduler, scaler)}
    random = torch.get_rng_state()
    x, y = make_batch(0, 0, SAMPLES, torch.float32)
    dataset = TensorDataset(x, y, torch.arange(SAMPLES))
    sampler = LeasedSampler(dataset, 4, sync=sync)
    loader = LeasedLoader(DataLoader(dataset, batch_sampler=sampler))
    used: list[tuple[int, int]] = []
    deadline = time.monotonic() + 40
    while not kept.check(["last"]) or sampler.epoch <= int(kept.get("last")):
        assert time.monotonic() < deadline, sync.stats
        epoch = sampler.epoch
        for *batch, indices in loader:
            used += [(epoch, int(index)) for index in indices]
            optimizer.zero_grad()
            scaler.scale(loss_of(model, batch)).backward()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            states[sync.step] = states_of(model, optimizer, scheduler, scaler)
            if rank == 0 and sync.step == 6:
                kept.set("joins", "")
            time.sleep(0.005)
        if rank == size and used and not kept.check(["last"]):
            kept.set("last", str(epoch + 2))
    sync.finish()
    return states, used, random, sampler.repeated


def test_what_a_newcomer_receives() -> None:
    """Model, buffers, optimizer, step; by ``share_state`` scheduler and scaler; and its data.

    Its random state stays its own.
    """
    results = run(train_with_everything, workers=2, newcomers=1)
    others, newcomer = results[0][0], results[2][0]
    begun = min(newcomer)
    assert begun >= 6
    assert begun in others
    assert newcomer[begun]["optimizer"][0]["exp_avg"].abs().sum() > 0
    assert newcomer[begun]["scaler"]["scale"] > 8
    assert newcomer[begun]["lr"] == pytest.approx(0.01 * 0.9**begun)
    assert newcomer[begun]["buffers"]["1.running_mean"].abs().sum() > 0
    for step in set(newcomer) & set(others):
        del newcomer[step]["buffers"], others[step]["buffers"]  # each worker has its own
        torch.testing.assert_close(newcomer[step], others[step], rtol=0, atol=0)
    counts = Counter(sample for _, used, _, _ in results for sample in used)
    epochs = max(epoch for epoch, _ in counts) + 1
    assert counts == Counter({(e, s): 1 for e in range(epochs) for s in range(SAMPLES)})
    assert all(repeated == 0 for *_, repeated in results)
    torch.manual_seed(2)
    _ = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    assert torch.equal(results[2][2], torch.get_rng_state())
