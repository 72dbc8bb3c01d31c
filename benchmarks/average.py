"""A mean of models (``ModelMean``) against one bare all-reduce of as many bytes.

Both in the same processes, in turn, behind a barrier; the time of the slowest worker counts. The
bare all-reduce sums one flat tensor in place: it neither collects the model's tensors nor divides
nor puts anything back.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.harness import Result, compare, interleave, slowest
from benchmarks.processes import run
from offbeat.fabric import Team, TorchCommunicator, Wire
from offbeat.averaging import ModelMean, Replica


def make_model(millions: int) -> nn.Module:
    """An MLP of ``millions`` M parameters, with biases and normalisation like any other."""
    layers: list[nn.Module] = []
    for _ in range(round(millions * 1e6 / (1024 * 1024))):
        layers += [nn.Linear(1024, 1024), nn.LayerNorm(1024), nn.ReLU()]
    return nn.Sequential(*layers)


def measure(millions: int, repetitions: int) -> dict[str, list[float]]:
    """Runs on every worker: seconds of the mean and of the bare all-reduce."""
    torch.manual_seed(dist.get_rank())
    model = make_model(millions)
    team = Team(TorchCommunicator(None, timeout_seconds=60))
    models = ModelMean(team, Replica(model, model.parameters()), Wire(team), referenced=False)
    flat = torch.zeros(sum(p.numel() for p in model.parameters()))
    expected = torch.stack([p.detach().double().mean() for p in model.parameters()])
    dist.all_reduce(expected)
    functions = {
        "average": lambda: models.average(1.0, team.size, what="benchmark"),
        "bare": lambda: dist.all_reduce(flat),
    }
    seconds = interleave(functions, repetitions, between=dist.barrier)
    found = torch.stack([p.detach().double().mean() for p in model.parameters()])
    torch.testing.assert_close(found, expected / team.size, rtol=1e-4, atol=1e-7)
    return seconds


def result(millions: int, workers: int, bandwidth: str | None, repetitions: int) -> Result:
    """One row."""
    config: dict[str, Any] = {"millions": millions, "repetitions": repetitions}
    each = run(measure, workers=workers, bandwidth=bandwidth, **config)
    seconds = slowest(each)
    ratio, details = compare(seconds["average"], seconds["bare"])
    link = bandwidth or "loopback"
    return Result(
        "average",
        f"mean of {millions} M parameters / bare all_reduce, {workers} workers, {link}",
        ratio,
        1.05,
        config={**config, "workers": workers, "link": link},
        details=details,
    )


def results(*, quick: bool = False) -> list[Result]:
    """All figures of this benchmark."""
    return [
        result(millions, workers, bandwidth, repetitions // 4 if quick else repetitions)
        for bandwidth, repetitions in ((None, 40), ("1Gbit/s", 12))
        for workers in (2, 4)
        for millions in ((10,) if quick else (10, 25))
    ]
