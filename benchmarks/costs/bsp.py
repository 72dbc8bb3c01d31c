"""A training step under ``offbeat.BSP`` against torch's DistributedDataParallel.

Both train a model of the same size on the same batches, in the same processes, in turn: zero_grad,
forward, backward, SGD step. The time of the slowest worker counts.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import offbeat
from benchmarks.costs.average import make_model
from benchmarks.harness import Result, compare, interleave, slowest
from benchmarks.processes import run


def measure(millions: int, repetitions: int) -> dict[str, list[float]]:
    """Measure the seconds of a step of each kind. Runs on every worker."""
    torch.manual_seed(0)
    ours, theirs = make_model(millions), make_model(millions)
    wrapped = nn.parallel.DistributedDataParallel(theirs)
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-4) for m in (ours, theirs)]
    sync = offbeat.attach(ours, optimizers[0], offbeat.BSP())
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(32, 1024, generator=torch.Generator().manual_seed(dist.get_rank()))

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    functions = {
        "offbeat": lambda: step(ours, optimizers[0]),
        "ddp": lambda: step(wrapped, optimizers[1]),
    }
    seconds = interleave(functions, repetitions, between=dist.barrier)
    sync.finish()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)  # the same training
    return seconds


def result(
    workers: int, bandwidth: str | None, millions: int, repetitions: int, target: float
) -> Result:
    """Return one figure."""
    config: dict[str, Any] = {"millions": millions, "repetitions": repetitions}
    seconds = slowest(run(measure, workers=workers, bandwidth=bandwidth, **config))
    ratio, details = compare(seconds["offbeat"], seconds["ddp"])
    link = bandwidth or "loopback"
    return Result(
        "bsp",
        f"step of BSP / of DDP, {millions} M parameters, {workers} workers, {link}",
        ratio,
        target,
        config={**config, "workers": workers, "link": link},
        details=details,
    )


def results(*, quick: bool = False) -> list[Result]:
    """Return all figures of this benchmark."""
    return [
        result(workers, bandwidth, millions, repetitions // 3 if quick else repetitions, target)
        for bandwidth, repetitions, target in ((None, 60, 1.05), ("1Gbit/s", 30, 1.0))
        for workers in (2, 4)
        for millions in ((10,) if quick else (4, 10))
    ]
