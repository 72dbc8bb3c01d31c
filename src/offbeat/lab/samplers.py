"""Who reads what: the sampler of a worker, its batches, and what it gets of others."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Sampler

from offbeat.data import SelDPSampler, partition_by_label, partition_dirichlet
from offbeat.lab.recipes import Task


def make_sampler(
    task: Task,
    workers: int,
    rank: int,
    *,
    seed: int,
    kind: str = "seldp",
    partition: str | None = None,
) -> Sampler[int]:
    """Which samples worker ``rank`` reads, and in which order.

    Args:
        task: What is trained.
        workers: N.
        rank: n.
        seed: Seed of the order, and of the partition.
        kind: ``seldp``, all of them by rotation; ``defdp``, an N-th that stays its own;
            ``distributed``, torch's ``DistributedSampler``: another N-th in every epoch.
        partition: ``label:K`` or ``dirichlet:A``: the worker's own part.

    Raises:
        ValueError: an unknown kind of partition or sampler, or data without labels.
    """
    if kind not in ("seldp", "defdp", "distributed"):
        raise ValueError(f"sampler must be seldp, defdp or distributed, got {kind!r}")
    if partition is not None:
        parts = make_partition(partition, task, workers, seed)
        return SelDPSampler(task.samples, workers, rank, seed=seed, partition=parts)
    if kind == "defdp":
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(task.samples), generator=generator)
        chunks = [chunk.numpy() for chunk in order.tensor_split(workers)]
        return SelDPSampler(task.samples, workers, rank, seed=seed, partition=chunks)
    if kind == "distributed":
        return DistributedSampler(task.samples, workers, rank, seed=seed)
    return SelDPSampler(task.samples, workers, rank, seed=seed)


def make_partition(text: str, task: Task, workers: int, seed: int) -> list[Any]:
    """The parts that ``label:K`` or ``dirichlet:A`` means for the data of ``task``.

    Raises:
        ValueError: another text, or data without one label a sample.
    """
    kind, _, value = text.partition(":")
    labels = task.samples.labels
    if kind not in ("label", "dirichlet"):
        raise ValueError(f"partition must be label:K or dirichlet:A, got {text!r}")
    if labels is None or labels.dim() != 1:
        raise ValueError("a partition needs data with one label a sample; this recipe has none")
    try:
        if kind == "label":
            return partition_by_label(labels, workers, int(value), seed)
        return partition_dirichlet(labels, workers, float(value), seed)
    except ValueError as error:
        raise ValueError(f"partition {text!r}: {error}") from None


class Batches(Iterable[tuple[Tensor, ...]]):
    """``task.steps`` batches in the order of ``sampler``, epoch after epoch.

    Args:
        task: What is trained.
        sampler: Which samples.
        size: Samples in a batch; None is the task's own.
        readers: Processes that read ahead.
        done: Batches that a run which is resumed had before.
    """

    def __init__(
        self,
        task: Task,
        sampler: Sampler[int],
        *,
        size: int | None = None,
        readers: int = 0,
        done: int = 0,
    ) -> None:
        self._task, self._sampler, self._done = task, sampler, done
        size = task.batch_size if size is None else size
        total = len(sampler)  # type: ignore[arg-type]  # both kinds have a length
        self._grouped = _Rest(BatchSampler(sampler, size, drop_last=total > size))
        self._loader = DataLoader(
            task.samples, batch_size=None, sampler=self._grouped, num_workers=readers
        )

    def __len__(self) -> int:
        return self._task.steps

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        given, (epoch, self._grouped.skip) = self._done, divmod(self._done, len(self._grouped))
        while True:
            self._sampler.set_epoch(epoch)  # type: ignore[attr-defined]
            # A loader that begins an epoch draws a number, which this epoch has drawn before.
            again = torch.random.fork_rng(devices=[], enabled=self._grouped.skip > 0)
            with again:
                batches = iter(self._loader)
            for batch in batches:
                if given == self._task.steps:
                    return
                given += 1
                yield batch
            epoch += 1


class _Rest(Sampler[list[int]]):
    """Groups of samples, without the first ``skip`` of them the next time."""

    def __init__(self, inner: BatchSampler) -> None:
        self._inner, self.skip = inner, 0

    def __len__(self) -> int:
        return len(self._inner)

    def __iter__(self) -> Iterator[list[int]]:
        skip, self.skip = self.skip, 0
        return itertools.islice(iter(self._inner), skip, None)


def parse_injection(text: str) -> tuple[float, float]:
    """α and β from text such as ``0.5,0.5``.

    Raises:
        ValueError: another text, or a number that is not in (0, 1].
    """
    try:
        alpha, beta = (float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"injection must be ALPHA,BETA as in 0.5,0.5, got {text!r}") from None
    if not (0 < alpha <= 1 and 0 < beta <= 1):
        raise ValueError(f"injection needs two numbers above 0 and up to 1, got {text!r}")
    return alpha, beta
