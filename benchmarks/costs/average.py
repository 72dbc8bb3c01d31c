"""Blocking means of models against one bare all-reduce of the same size.

There are two means: the one of ``LocalSGD`` in training (a part that is launched and landed), and
the exact mean of a consensus. All three run in the same processes, in turn, after a barrier; the
time of the slowest worker counts. The bare all-reduce sums one flat tensor in place. It does not
collect the model's tensors, divide, or write anything back.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.harness import Result, compare, interleave, slowest
from benchmarks.processes import run
from offbeat.averaging import Replica, Worker
from offbeat.averaging.averager import RoundAverager, Step
from offbeat.averaging.model_mean import ModelMean
from offbeat.quantization.wire import Wire
from offbeat.strategies.base import GlobalModel
from offbeat.strategies.local_sgd import LocalSGD
from offbeat.transport.team import Team
from offbeat.transport.torch_backend.torch_distributed import TorchCommunicator

MEANS = {"training": "mean of", "exact": "exact mean of"}


def make_model(millions: int) -> nn.Module:
    """Return an MLP of ``millions`` M parameters, with biases and normalization."""
    layers: list[nn.Module] = []
    for _ in range(round(millions * 1e6 / (1024 * 1024))):
        layers += [nn.Linear(1024, 1024), nn.LayerNorm(1024), nn.ReLU()]
    return nn.Sequential(*layers)


def measure(millions: int, repetitions: int) -> dict[str, list[float]]:
    """Measure the seconds of both means and of the bare all-reduce. Runs on every worker."""
    torch.manual_seed(dist.get_rank())
    model = make_model(millions)
    team = Team(TorchCommunicator(None, timeout_seconds=60))
    parameters = [*model.parameters()]
    replica = Replica(model, parameters)
    averager = RoundAverager(
        LocalSGD(period=1), Worker(team, replica, [], Wire(team)), GlobalModel()
    )
    averager.start()
    exact = ModelMean(team, replica)
    flat = torch.zeros(sum(p.numel() for p in model.parameters()))
    expected = torch.stack([p.detach().double().mean() for p in model.parameters()])
    dist.all_reduce(expected)

    def training() -> None:
        flight = averager.begin_launch(averager.parts, 1.0, lambda: float(team.size), [Step()])
        for _ in flight.work:
            pass
        averager.send(flight)
        averager.land(flight)

    functions = {
        "training": training,
        "exact": lambda: exact.average(1.0, team.size, what="benchmark"),
        "bare": lambda: dist.all_reduce(flat),
    }
    seconds = interleave(functions, repetitions, between=dist.barrier)
    found = torch.stack([p.detach().double().mean() for p in model.parameters()])
    torch.testing.assert_close(found, expected / team.size, rtol=1e-4, atol=1e-7)
    return seconds


def rows(millions: int, workers: int, bandwidth: str | None, repetitions: int) -> list[Result]:
    """Return one figure for each mean."""
    config: dict[str, Any] = {"millions": millions, "repetitions": repetitions}
    each = run(measure, workers=workers, bandwidth=bandwidth, **config)
    seconds = slowest(each)
    link = bandwidth or "loopback"
    found = []
    for name, what in MEANS.items():
        ratio, details = compare(seconds[name], seconds["bare"])
        text = f"{what} {millions} M parameters / bare all_reduce, {workers} workers, {link}"
        full = {**config, "workers": workers, "link": link}
        found.append(Result("average", text, ratio, 1.05, config=full, details=details))
    return found


def results(*, quick: bool = False) -> list[Result]:
    """Return all figures of this benchmark."""
    return [
        row
        for bandwidth, repetitions in ((None, 40), ("1Gbit/s", 12))
        for workers in (2, 4)
        for millions in ((10,) if quick else (10, 25))
        for row in rows(millions, workers, bandwidth, repetitions // 4 if quick else repetitions)
    ]
