"""Streaming averaging, nothing set: what a step costs beside the parts that travel.

Workers of the same processes train a CNN of 2.1 million parameters by turns, forty steps under
streaming averaging and forty of another such model alone, over shaped links. So both see the same
machine. Each worker is pinned to its share of the cores, as ``offbeat compare`` does. With as many
workers as cores nothing else wants a core; with twice as many, all that is computed for the network
is taken from the training.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import offbeat
from benchmarks.harness import Result
from benchmarks.models import cifar_wide
from benchmarks.processes import run
from offbeat.lab.train import share_cores

STEPS = 40
WARM_UP = 2  # blocks in which the pace is found


def make_step() -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    """A model, its optimizer and a function that takes one step on invented images."""
    torch.manual_seed(0)
    model = cifar_wide.network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    x, y = torch.randn(32, 3, 32, 32), torch.randint(10, (32,))

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return model, optimizer, step


def measure(blocks: int) -> dict[str, Any]:
    """Runs on every worker: wall and processor time of a step under Offbeat against alone."""
    share_cores(dist.get_world_size(), dist.get_rank())
    model, optimizer, ours = make_step()
    *_, alone = make_step()
    sync = offbeat.attach(model, optimizer)

    def block(step: Callable[[], None]) -> tuple[float, float]:
        with sync.consensus():  # all begin together; in a plain barrier nobody would answer
            pass
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(STEPS):
            step()
        return time.perf_counter() - wall, time.process_time() - cpu

    pairs = [(block(ours), block(alone)) for _ in range(WARM_UP + blocks)][WARM_UP:]
    waited, stats = sync.stats.idle, dict(sync.stats.details)
    sync.detach()
    return {
        "wall": [[seconds / STEPS for seconds, _ in pair] for pair in pairs],
        "cpu": [[seconds / STEPS for _, seconds in pair] for pair in pairs],
        "idle": waited,
        "steps_a_model": stats["pass_steps"],
        **{name: stats[name] for name in ("parts", "window", "landing_seconds")},
    }


def ratio(workers: list[list[list[float]]], of_all: Callable[[Iterable[float]], float]) -> float:
    """The median over the blocks, of each pair [under Offbeat, alone] ``of_all`` workers."""
    blocks = [
        [of_all(both) for both in zip(*pairs, strict=True)] for pairs in zip(*workers, strict=True)
    ]
    return statistics.median(ours / alone for ours, alone in blocks)


def results(*, quick: bool = False) -> list[Result]:
    """All figures of this benchmark."""
    found, blocks = [], 3 if quick else 8
    cores = len(os.sched_getaffinity(0))
    for workers, most in ((cores, 1.05), (2 * cores, None)):
        for bandwidth in ("1Gbit/s", "200Mbit/s", "50Mbit/s"):
            each = run(measure, workers=workers, bandwidth=bandwidth, seconds=400, blocks=blocks)
            # Who ends a block first leaves its core to the others: the last one counts.
            wall = ratio([one["wall"] for one in each], max)
            cpu = ratio([one["cpu"] for one in each], sum)
            config = {"workers": workers, "cores": cores, "bandwidth": bandwidth, "blocks": blocks}
            what = f"streaming, {workers} workers on {cores} cores, {bandwidth}"
            for name, value, unit, target in (
                ("step / alone", wall, "", most),
                ("processor time of a step / alone", cpu, "", None),
                ("idle", 100 * max(one["idle"] for one in each), "%", 1.0),
            ):
                found.append(
                    Result("beside", f"{what}: {name}", value, target, unit, config, each[0])
                )
    return found
