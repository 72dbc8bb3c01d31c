"""The batches of a run whose workers lease their data (``--partition leased``).

A faster worker takes more batches, so the workers take different numbers of steps. Whatever counts
steps in a run, such as the schedule and the evaluations, then counts the run's *position*: the
number of steps that each worker would have taken by now with equal shares.
"""

import math
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from offbeat import Synchronizer
from offbeat.data import LeasedLoader, LeasedSampler
from offbeat_lab.recipes import Task


def leased_batches(task: Task, sync: Synchronizer, *, workers: int, seed: int) -> Iterator[Any]:
    """Yield the batches of one worker. All workers together take ``task.steps`` per worker.

    Each batch sets ``task.position``.

    Args:
        task: Task that has the samples.
        sync: Synchronizer of the workers.
        workers: Number of workers with which the training begins.
        seed: Seed of the order of the samples.
    """
    sampler = LeasedSampler(
        task.samples,
        task.batch_size,
        sync=sync,
        seed=seed,
        drop_last=len(task.samples) > task.batch_size,
        total_batches=task.steps * workers,
    )
    loader = LeasedLoader(DataLoader(task.samples, batch_size=None, sampler=sampler))
    epochs = math.ceil(task.steps * workers / sampler.batches)
    for epoch in range(sampler.epoch, epochs):
        sampler.set_epoch(epoch)
        for batch in loader:
            done = sampler.progress * sampler.batches / workers
            task.position = min(task.steps, math.floor(done))
            yield batch
    task.position = task.steps  # no batch is left
