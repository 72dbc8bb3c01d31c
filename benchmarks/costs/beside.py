"""Cost of a step under streaming averaging with default settings, against a step alone.

Each process trains two models in turn, over shaped links: some steps of one under streaming
averaging, then the same number of steps of the other alone. So both see the same machine. The model
is a CNN of 2.1 million parameters with SGD, or the transformer of ``stdlib-lm``, half a million
parameters with AdamW. Each worker is pinned to its share of the cores, as in ``offbeat compare``.
With as many workers as cores, the communication threads compete with one worker only; with twice as
many, their processor time is taken from the training.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import offbeat
from benchmarks.harness import Result
from benchmarks.processes import run
from offbeat_lab.launch.cores import share_cores
from offbeat_lab.recipes import stdlib_lm
from offbeat_lab.recipes.models import transformers

STEPS = {"cnn": 40, "lm": 20}  # in a block
WARM_UP = 2  # blocks in which the number of parts in a message settles


def wide_cnn() -> nn.Module:
    """Return a CNN of 2.1 million parameters for images of 32 × 32 pixels."""
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(2048, 960), nn.ReLU(), nn.Linear(960, 10)),
    )


def make_step(model: str) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    """Return a model (``cnn`` or ``lm``), its optimizer, and a function that takes one step."""
    torch.manual_seed(0)
    network: nn.Module
    optimizer: torch.optim.Optimizer
    if model == "cnn":
        network = wide_cnn()
        optimizer = torch.optim.SGD(network.parameters(), lr=0.001, momentum=0.9)
        x, y = torch.randn(32, 3, 32, 32), torch.randint(10, (32,))
    else:
        network = transformers.ByteTransformer()
        optimizer = torch.optim.AdamW(network.parameters(), lr=0.0001)
        x = torch.randint(256, (stdlib_lm.BATCH_SIZE, stdlib_lm.CONTEXT), dtype=torch.uint8)
        y = x.long()

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(x).flatten(0, -2), y.flatten()).backward()
        optimizer.step()

    return network, optimizer, step


def measure(model: str, blocks: int) -> dict[str, Any]:
    """Measure wall and processor time of a step, with Offbeat and alone. Runs on every worker."""
    share_cores(dist.get_world_size(), dist.get_rank())
    network, optimizer, ours = make_step(model)
    *_, alone = make_step(model)
    sync = offbeat.attach(network, optimizer)
    steps = STEPS[model]

    def block(step: Callable[[], None]) -> tuple[float, float]:
        with sync.consensus():  # a barrier; a plain one would not serve the landings
            pass
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            step()
        return time.perf_counter() - wall, time.process_time() - cpu

    pairs = [(block(ours), block(alone)) for _ in range(WARM_UP + blocks)][WARM_UP:]
    waited, taken, stats = sync.stats.idle, sync.stats.steps, dict(sync.stats.details)
    sync.detach()
    return {
        "wall": [[seconds / steps for seconds, _ in pair] for pair in pairs],
        "cpu": [[seconds / steps for _, seconds in pair] for pair in pairs],
        "idle": waited,
        "steps_a_model": taken * stats["parts"] / stats["landings"],
        **{name: stats[name] for name in ("parts", "message_parts", "landing_seconds")},
    }


def ratio(workers: list[list[list[float]]], of_all: Callable[[Iterable[float]], float]) -> float:
    """Return the median over the blocks of with Offbeat / alone.

    Args:
        workers: For each worker the pairs (with Offbeat, alone), one for each block.
        of_all: Reduction over the workers: ``max`` or ``sum``.
    """
    blocks = [
        [of_all(both) for both in zip(*pairs, strict=True)] for pairs in zip(*workers, strict=True)
    ]
    return statistics.median(ours / alone for ours, alone in blocks)


def of_cell(model: str, workers: int, bandwidth: str, blocks: int) -> list[Result]:
    """Return step time, processor time and idle share of one model on one kind of link."""
    cores = len(os.sched_getaffinity(0))
    config = {
        "model": model,
        "workers": workers,
        "cores": cores,
        "bandwidth": bandwidth,
        "blocks": blocks,
    }
    each = run(
        measure, workers=workers, bandwidth=bandwidth, seconds=600, model=model, blocks=blocks
    )
    # A worker that ends a block early leaves its core to the others, so the slowest one counts.
    wall = ratio([one["wall"] for one in each], max)
    cpu = ratio([one["cpu"] for one in each], sum)
    what = "streaming, " + ("transformer, " if model == "lm" else "")
    what += f"{workers} workers on {cores} cores, {bandwidth}"
    return [
        Result("beside", f"{what}: {name}", value, target, unit, config, each[0])
        for name, value, unit, target in (
            ("step / alone", wall, "", 1.05 if workers == cores else None),
            ("processor time of a step / alone", cpu, "", None),
            ("idle", 100 * max(one["idle"] for one in each), "%", 1.0),
        )
    ]


def results(*, quick: bool = False) -> list[Result]:
    """Return all figures of this benchmark."""
    few = len(os.sched_getaffinity(0))
    cells = [
        *product(("cnn",), (few, 2 * few), ("1Gbit/s", "200Mbit/s", "50Mbit/s")),
        *product(("lm",), (few, 2 * few), ("50Mbit/s",)),
    ]
    return [one for cell in cells for one in of_cell(*cell, blocks=3 if quick else 8)]
