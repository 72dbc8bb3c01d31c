"""The training data of each worker: sampler, partition, batches, settings of data injection."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Sampler

from offbeat.data import SelDPSampler
from offbeat.extend import did_you_mean
from offbeat_lab.partition import partition_by_label, partition_dirichlet
from offbeat_lab.recipes import Task

_SHUFFLE = 3  # generators are seeded by (seed, purpose, epoch, rank); this is the purpose
_KINDS = ("seldp", "defdp", "distributed")


def make_sampler(
    task: Task,
    workers: int,
    rank: int,
    *,
    seed: int,
    kind: str = "seldp",
    partition: str | None = None,
) -> Sampler[int]:
    """Return the sampler of worker ``rank``.

    Args:
        task: Task that has the samples.
        workers: Number of workers.
        rank: Rank of the worker.
        seed: Seed of the order and of the partition.
        kind: ``seldp``: each worker reads all samples and starts at a different place. ``defdp``:
            each of N workers reads a fixed 1/N of the samples. ``distributed``: torch's
            ``DistributedSampler``, which gives a worker a different 1/N in every epoch.
        partition: Partition of the samples among the workers, such as ``label:2``; see
            ``make_partition``. Requires ``seldp``. None: no partition.
    """
    if kind not in _KINDS:
        raise ValueError(
            f"sampler must be seldp, defdp or distributed, got {kind!r}{did_you_mean(kind, _KINDS)}"
        )
    if partition is not None and kind != "seldp":
        raise ValueError(
            f"sampler {kind!r} with partition {partition!r}, which decides what a worker reads: "
            "leave one of them out"
        )
    if kind == "distributed" and partition is None:
        return DistributedSampler(task.samples, workers, rank, seed=seed)
    if partition is not None:
        parts = make_partition(partition, task, workers, seed)
    elif kind == "defdp":
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(task.samples), generator=generator, device="cpu")
        parts = [part.numpy() for part in order.tensor_split(workers)]
    else:
        return SelDPSampler(task.samples, workers, rank, seed=seed)
    if empty := [number for number, part in enumerate(parts) if not len(part)]:
        raise ValueError(
            f"every worker needs samples, part {empty[0]} of the partition has none; use fewer "
            "workers or another partition"
        )
    return PartSampler(parts[rank], rank, seed)


class PartSampler(Sampler[int]):
    """Reads the part of the samples that worker ``rank`` has, in a new order in every epoch."""

    def __init__(self, part: Any, rank: int, seed: int) -> None:
        self._part, self._rank, self._seed, self._epoch = part, rank, seed, 0

    def __len__(self) -> int:
        return len(self._part)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which determines the order."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        # Without the rank in the seed, workers with equally long parts would read the same
        # positions of their parts at the same time. Parts are usually sorted by index.
        random = np.random.default_rng([self._seed % 2**64, _SHUFFLE, self._epoch, self._rank])
        return iter(random.permutation(self._part).tolist())


def make_partition(text: str, task: Task, workers: int, seed: int) -> list[Any]:
    """Return the sample indices of each worker.

    ``text`` is ``label:K`` for K labels per worker, or ``dirichlet:A`` for shares of each label
    that are drawn from a Dirichlet distribution with parameter A.
    """
    kind, _, value = text.partition(":")
    labels = task.samples.labels
    if kind not in ("label", "dirichlet"):
        raise ValueError(f"partition must be label:K, dirichlet:A or leased, got {text!r}")
    if labels is None or labels.dim() != 1:
        raise ValueError("a partition needs data with one label per sample; this recipe has none")
    try:
        if kind == "label":
            return partition_by_label(labels, workers, int(value), seed)
        return partition_dirichlet(labels, workers, float(value), seed)
    except ValueError as error:
        raise ValueError(f"partition {text!r}: {error}") from None


class Batches(Iterable[tuple[Tensor, ...]]):
    """The batches of one worker for a whole run of ``task.steps`` steps.

    One iteration passes over the samples as often as necessary.

    Args:
        task: Task that has the samples.
        sampler: Sampler of this worker. It has a length and ``set_epoch``.
        size: Number of samples per batch. None: the task's batch size.
    """

    def __init__(
        self,
        task: Task,
        sampler: Sampler[int],
        *,
        size: int | None = None,
    ) -> None:
        self._task, self._sampler = task, sampler
        size = task.batch_size if size is None else size
        total = len(sampler)  # type: ignore[arg-type]  # all samplers above have a length
        grouped = BatchSampler(sampler, size, drop_last=total > size)
        self._loader = DataLoader(task.samples, batch_size=None, sampler=grouped)

    def __len__(self) -> int:
        return self._task.steps

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        count = epoch = 0
        while True:
            self._sampler.set_epoch(epoch)  # type: ignore[attr-defined]
            for batch in self._loader:
                if count == self._task.steps:
                    return
                count += 1
                yield batch
            epoch += 1


def parse_injection(text: str) -> tuple[float, float]:
    """Return α and β from text such as ``0.5,0.5``.

    In each step of data injection, a share α of the workers sends a share β of its batch to the
    other workers.
    """
    try:
        alpha, beta = (float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"injection must be ALPHA,BETA as in 0.5,0.5, got {text!r}") from None
    if not (0 < alpha <= 1 and 0 < beta <= 1):
        raise ValueError(f"injection needs two numbers above 0 and up to 1, got {text!r}")
    return alpha, beta
