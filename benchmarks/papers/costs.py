"""SelSync, Figures 2 and 8b: memory and time of a step, and the time to partition a data set.

Figure 2: the CNN of ``convergence`` on CIFAR-10, on one thread. Memory is parameters, gradients,
momentum and all tensors that autograd keeps for the backward pass. Time is the least CPU time of
several steps. Figure 8b: the CPU time in which worker 0 of 16 draws the order of an epoch with
SelDP, with as many samples as ImageNet.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.papers.runs import TASKS
from offbeat.data import SelDPSampler
from offbeat_lab.job import Job
from offbeat_lab.recipes import Task, find_recipe

BATCHES = (32, 512)
REPEATS = 7
WORKERS = 16
IMAGENET = 1_281_167  # samples


def least_seconds(function: Callable[[], Any], repeats: int = REPEATS) -> float:
    """Return the least CPU time of a call."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return min(times)


def saved_bytes(model: nn.Module, loss: Callable[[], torch.Tensor]) -> int:
    """Return the bytes that autograd keeps for the backward pass, without the parameters."""
    known = {one.untyped_storage().data_ptr() for one in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss()
    return sum(kept.values())


def of_batch(task: Task, size: int) -> dict[str, float]:
    """Return memory in bytes and CPU time of a step with batches of this size."""
    batch = task.samples.batch([*range(size)])

    def loss() -> torch.Tensor:
        return task.loss(task.model, batch)

    def step() -> None:
        task.optimizer.zero_grad()
        loss().backward()
        task.optimizer.step()

    parameters = 4 * sum(one.numel() for one in task.model.parameters())
    step()
    return {
        "batch": size,
        "bytes": 3 * parameters + saved_bytes(task.model, loss),
        "seconds": least_seconds(step),
    }


def epoch_seconds(samples: int) -> float:
    """Return the CPU time to the order of an epoch after the first one."""
    sampler = SelDPSampler(range(samples), WORKERS, 0)
    return least_seconds(lambda: next(iter(sampler)), 3)


def measure(seeds: int = 1) -> dict[str, Any]:
    """Return the data of both figures, which do not depend on a seed."""
    name, files = TASKS["cifar"]
    task = find_recipe(name).build(Job(name, "bsp", 1, data=files).setup())
    return {
        "batches": [of_batch(task, size) for size in BATCHES],
        "partitions": {"ImageNet": {"seldp epoch": epoch_seconds(IMAGENET)}},
    }
