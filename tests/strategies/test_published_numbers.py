"""Values that other implementations publish."""

import copy
import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import offbeat
from worlds import run


def streaming_diloco(rank: int, size: int) -> list[float]:
    """Return the first scalar before each of ten steps with the gradient 2."""
    model = nn.ParameterList([nn.Parameter(torch.ones(1)) for _ in range(2)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    strategy = offbeat.DiLoCo(period=6, fragments=2, outer_lr=2.0, outer_momentum=0.0)
    sync = offbeat.attach(model, optimizer, strategy)
    values = []
    for _ in range(10):
        values.append(model[0].item())
        optimizer.zero_grad()
        (2 * (model[0] + model[1])).sum().backward()
        optimizer.step()
    sync.finish()
    return values


def test_streaming_diloco_has_the_values_of_torchft() -> None:
    """Those of torchft's regression test without delay and with ``fragment_update_alpha`` 0.

    Its other cases mix the local with the global model, or drop the local steps of the delay.
    """
    expected = [1, -1, -3, -11, -13, -15, -17, -19, -21, -35]
    assert run(streaming_diloco, workers=2) == [expected] * 2


# asyncdiloco of Google DeepMind, AsyncLocalSGDToyExample.ipynb (e783a30), synchronous experiment:
# mixture of 32 Gaussians in 4 classes, five rounds of 20 steps of 4 workers. Each round begins with
# a new AdamW, whose first step has the full learning rate.
ROUNDS, STEPS, WORKERS, BATCH, SAMPLES, RATE = 5, 20, 4, 32, 128_000, 2e-4
PRINTED = [1.391600, 1.357046, 1.325124, 1.307899, 1.300403, 1.298819]


def seed_all() -> None:
    random.seed(42)
    np.random.seed(42)
    torch.manual_seed(42)


def gaussians() -> tuple[np.ndarray, np.ndarray]:
    centers = np.random.randn(32, 512)
    centers /= np.linalg.norm(centers, axis=1, keepdims=True)
    x = [(0.5 * np.random.randn(SAMPLES // 32, 512) + one).astype("float32") for one in centers]
    return np.concatenate(x), np.repeat(np.arange(4), SAMPLES // 4)


def shuffled(values: Sequence[int]) -> np.ndarray:
    found = np.array(values)
    random.shuffle(found)  # type: ignore[arg-type]
    return found


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_diloco_has_the_losses_of_asyncdiloco() -> None:
    seed_all()
    x, y = gaussians()
    quarters = shuffled(range(SAMPLES)).reshape(WORKERS, -1)
    held_out = random.sample(range(SAMPLES), 10_000)
    shown, labels = torch.tensor(x[held_out]), torch.tensor(y[held_out])
    seed_all()
    reads = [quarter[shuffled(range(len(quarter)))] for quarter in quarters]
    start = nn.Sequential(nn.Linear(512, 65_000), nn.ReLU(), nn.Linear(65_000, 4))

    def loss(model: nn.Module) -> float:
        with torch.no_grad():
            pairs = zip(shown.split(250), labels.split(250), strict=True)
            sums = [nn.functional.cross_entropy(model(a), b, reduction="sum") for a, b in pairs]
        return sum(each.item() for each in sums) / len(shown)

    def work() -> list[float]:
        rank, model = dist.get_rank(), copy.deepcopy(start)
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=1e-3)
        strategy = offbeat.DiLoCo(period=STEPS, outer_lr=0.5, outer_momentum=0.0)
        sync = offbeat.attach(model, optimizer, strategy, adam_correction=False)
        losses = []
        for step in range(ROUNDS * STEPS):
            if step % STEPS == 0:
                optimizer.state.clear()
                losses += [loss(model)] if rank == 0 else []
            cosine = (1 + math.cos(math.pi * step / (ROUNDS * STEPS))) / 2
            lr = RATE if step % STEPS == 0 else 1e-6 + (RATE - 1e-6) * cosine
            optimizer.param_groups[0]["lr"] = lr
            batch = reads[rank][step * BATCH : (step + 1) * BATCH]
            optimizer.zero_grad()
            outputs = model(torch.tensor(x[batch]))
            nn.functional.cross_entropy(outputs, torch.tensor(y[batch])).backward()
            optimizer.step()
        sync.finish()
        return [*losses, loss(model)]

    losses = offbeat.simulate(work, workers=WORKERS).results[0]
    assert losses == pytest.approx(PRINTED, abs=1e-6)
