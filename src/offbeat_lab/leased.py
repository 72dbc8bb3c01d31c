"""The batches of a run whose workers lease their data (``--partition leased``).

A faster worker takes more batches, so the workers take different numbers of steps. Whatever counts
steps in a run, such as the schedule and the evaluations, then counts the run's *position*: the
number of steps that each worker would have taken by now with equal shares.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from offbeat import Synchronizer
from offbeat.data import LeasedLoader, LeasedSampler
from offbeat_lab.recipes import Task


class LeasedBatches(Iterable[Any]):
    """The batches of one worker. All workers together take ``task.steps`` batches per worker.

    Each batch sets ``task.position``.

    Args:
        task: Task that has the samples.
        sync: Synchronizer of the workers.
        workers: Number of workers with which the training begins.
        seed: Seed of the order of the samples.
    """

    def __init__(self, task: Task, sync: Synchronizer, *, workers: int, seed: int) -> None:
        self._task, self._workers = task, workers
        size = task.batch_size
        self._sampler = LeasedSampler(
            task.samples,
            size,
            sync=sync,
            seed=seed,
            drop_last=len(task.samples) > size,
            total_batches=task.steps * workers,
        )
        self._loader = LeasedLoader(
            DataLoader(task.samples, batch_size=None, sampler=self._sampler)
        )

    def __iter__(self) -> Iterator[Any]:
        task, sampler = self._task, self._sampler
        epochs = math.ceil(task.steps * self._workers / sampler.batches)
        for epoch in range(sampler.epoch, epochs):
            sampler.set_epoch(epoch)
            for batch in self._loader:
                done = sampler.progress * sampler.batches / self._workers
                task.position = min(task.steps, math.floor(done))
                yield batch
        task.position = task.steps  # no batch is left
