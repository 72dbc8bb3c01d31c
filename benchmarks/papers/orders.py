"""SelSync, Figure 7 and the price of its order: which samples the workers read, under BSP.

In the paper's SelDP the N chunks of the data are cut once, and each worker reads them in rotated
order. So the N workers together read the same samples at the same position of every chunk: the
global batches are repeated in N consecutive passes. Workers that train locally do not repeat their
own batches, but BSP trains on global batches only. Here the CNN on CIFAR-10 of ``convergence``
trains with each order. Under BSP, 8 workers with a batch each are one process with their global
batch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import Sampler

from benchmarks.papers.convergence import SETTINGS, WORKERS
from benchmarks.papers.runs import SEEDS, Row, grouped, kept, markdown, small_figure, spread
from offbeat.data import SelDPSampler
from offbeat_lab.recipes import Task, find_recipe
from offbeat_lab.samplers import Batches

ORDERS = {
    "paper": "SelDP in the paper's order",
    "seldp": "`SelDPSampler`",
    "distributed": "`DistributedSampler`",
    "defdp": "DefDP",
}
"""Order → its name in the table."""
DRAWN = 4  # workers in the drawing


class PaperOrder(Sampler[int]):
    """SelDP as in the paper: a worker reads the N chunks in rotated order, in every epoch."""

    def __init__(self, samples: int, workers: int, rank: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        chunks = torch.randperm(samples, generator=generator).tensor_split(workers)
        self._order = torch.cat([*chunks[rank:], *chunks[:rank]]).tolist()

    def __len__(self) -> int:
        return len(self._order)

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: the order is the same in every epoch."""

    def __iter__(self) -> Iterator[int]:
        return iter(self._order)


def global_batches(task: Task, samplers: Sequence[Sampler[int]]) -> Iterator[list[torch.Tensor]]:
    """Yield the batches that all workers together read in a step."""
    for step in zip(*(Batches(task, one) for one in samplers), strict=True):
        yield [torch.cat(tensors) for tensors in zip(*step, strict=True)]


def trained(order: str, seed: int) -> Row:
    """Train under BSP with this order, and return accuracy and loss at the end."""
    job = replace(SETTINGS["cifar"].job, seed=seed)
    if order != "paper":
        job = replace(job, sampler=order)
    torch.manual_seed(seed)
    task = find_recipe(job.recipe).build(job.setup())
    samplers = [
        PaperOrder(len(task.samples), WORKERS, rank, seed)
        if order == "paper"
        else job.sampler_for(task, rank)
        for rank in range(WORKERS)
    ]
    for batch in global_batches(task, samplers):
        task.loss(task.model, tuple(batch)).backward()
        task.optimizer.step()
        task.advance()
    return task.evaluate(task.model)


def table(data: dict[str, Any]) -> str:
    """Return accuracy and loss of each order as Markdown."""
    rows = [
        [
            ORDERS[order],
            spread([row["accuracy"] for row in found]),
            spread([row["loss"] for row in found], 1, 2),
        ]
        for (order,), found in grouped(data["orders"], "order").items()
    ]
    return markdown(["order of the samples", "accuracy, %", "loss"], rows)


def measure(seeds: int = SEEDS) -> dict[str, Any]:
    """Return accuracy and loss of each order and seed."""
    wanted = [{"order": order, "seed": seed} for seed in range(seeds) for order in ORDERS]
    return {"orders": kept("orders", wanted, trained)}


def draw(_: dict[str, Any]) -> None:
    """Draw which chunk each of four workers reads in each pass: the paper's Figure 7."""
    passes = range(1, DRAWN + 1)
    rotated = [[*SelDPSampler(passes, DRAWN, rank, shuffle=False)] for rank in range(DRAWN)]
    fixed = [[rank] * DRAWN for rank in range(DRAWN)]
    with small_figure("papers-seldp", "pass over the data", "worker", of=2) as every:
        titles = ("DefDP", "SelDP: chunks read again are shuffled")
        for axes, chunks, title in zip(every, (fixed, rotated), titles, strict=True):
            axes.imshow(chunks, cmap="Pastel1", vmin=0, vmax=8)
            for worker, row in enumerate(chunks):
                for position, chunk in enumerate(row):
                    axes.text(position, worker, f"$D_{chunk}$", ha="center", va="center")
            axes.set_title(title, fontsize="medium")
            axes.set_yticks(range(DRAWN))
            axes.set_xticks(range(DRAWN), [str(one) for one in passes])
            axes.grid(visible=False)
