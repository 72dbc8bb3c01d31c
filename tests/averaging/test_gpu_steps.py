"""On a GPU, a step launches few kernels, and the host does not wait for them; on a double."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gpu as double
from cells import nightly
from gpu import CUDA, Gpu, on_gpu
from loops import attach
from problems import flat, loss_of, make_batch
from worlds import simulated

STEPS = 8


def train(
    rank: int,
    size: int,
    gpu: Gpu | None,
    wire: str,
    policy: str,
    layers: int,
    norm: bool,
    stored: str = "float32",
) -> tuple[Tensor, int]:
    """Return the trained model, and the number of launched parts. Only steps are counted."""
    torch.manual_seed(rank)
    inner: list[nn.Module] = [nn.Linear(64, 64) for _ in range(layers)]
    inner += [nn.BatchNorm1d(64)] * norm
    model = nn.Sequential(nn.Linear(4, 64), *inner, nn.Linear(64, 1))
    if gpu is not None:
        double.move_to_gpu(model)
        gpu.training.add(threading.get_ident())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    text = f"streaming:parts=4,stored={stored}"
    sync = attach(model, optimizer, text, wire=wire, non_finite=policy)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, make_batch(rank, step, dtype=torch.float32)).backward()
        if gpu is not None and step == 2:  # no worker still attaches
            gpu.on = True
        optimizer.step()
    if gpu is not None:
        gpu.on = False
    launches = sync.stats.details["launches"]
    assert sync.stats.details["landings"] >= STEPS // 2
    sync.finish()
    return flat(model), launches


@pytest.mark.parametrize(
    ("policy", "stored"), [("raise", "float32"), ("warn", "float32"), ("raise", "host")]
)
@pytest.mark.parametrize("wire", ["int4", "float32"])
def test_the_host_does_not_wait_in_a_step(
    wire: str, policy: str, stored: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even to check the updates and the buffers for NaN. With torch operations."""
    gpu = double.install(monkeypatch)
    simulated(train, gpu, wire, policy, 1, True, stored, workers=3)
    assert [event for event in gpu.counts if event[0] == "wait"] == []
    assert gpu.counts
    assert gpu.streams.races == []


SIZES = [(2, 1, "float32"), (3, 1, "float32"), (2, 1, "host")]
LARGE = nightly([(3, 12, "float32"), (9, 1, "float32"), (3, 1, "host")])


@pytest.mark.parametrize("size", [*SIZES, *LARGE], ids=str)
def test_a_part_takes_at_most_ten_kernels(
    size: tuple[int, int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the number of tensors and workers. Copies to and from the host do not count."""
    workers, layers, stored = size
    options = "int4", "raise", layers, False, stored
    want = simulated(train, None, *options, workers=workers)
    gpu = double.install(monkeypatch)
    double.install_kernels(monkeypatch)
    found = simulated(train, gpu, *options, workers=workers)
    assert {kind for kind, _, _ in gpu.counts} == {"kernel"}
    # In host memory a message has many pieces, whose squared norms are concatenated.
    assert len(gpu.counts) <= 10 + (stored == "host"), gpu.counts
    assert max(gpu.counts.values()) <= sum(launches for _, launches in found), gpu.counts
    assert gpu.streams.races == []
    for (model, _), (expected, _) in zip(found, want, strict=True):
        assert torch.equal(model, expected)


WAITS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda t: t.sum().item(),
    "bool": lambda t: bool(t.isnan().any()),
    "tolist": lambda t: t.tolist(),
    "cpu": lambda t: t.cpu(),
    "to": lambda t: t.to("cpu"),
    "numpy": lambda t: t.numpy(),
    "upload": lambda t: torch.ones(3).to(CUDA),
    "assignment": lambda t: t.__setitem__(slice(3), torch.ones(3)),
    "mask": lambda t: t[t > 0],
    "literal": lambda t: torch.tensor(1.0, device=CUDA),
}


@pytest.mark.parametrize("wait", WAITS)
def test_the_double_notices_every_wait(wait: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = double.install(monkeypatch)
    gpu.training.add(threading.get_ident())
    monkeypatch.setattr(double, "ELSEWHERE", set())
    monkeypatch.setattr(double, "PACKAGE", Path(__file__).parent)
    tensor = on_gpu(torch.ones(4))
    gpu.on = True
    torch.ones(3).pin_memory().to(CUDA, non_blocking=True)
    assert gpu.total("wait") == 0
    WAITS[wait](tensor)
    assert gpu.total("wait") >= 1
