"""The plan of an epoch: the order of its samples, and its division into chunks.

A *chunk* is a run of consecutive batches that one worker takes. All workers use the same plan.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

Range = tuple[int, int]
"""Positions in the shuffled epoch, from the first to the second, which is excluded."""

_CHUNKS = 16  # a chunk has 1/(16·N) of the batches that are left, for N workers


@dataclass(frozen=True)
class Settings:
    """What determines the samples of every epoch and their order. Equal on all workers.

    Attributes:
        samples: Number of samples in the dataset.
        batch_size: Number of samples in a batch. The last batch of an epoch may be smaller.
        shuffle: True to shuffle the samples in every epoch.
        seed: Seed of the shuffle.
        drop_last: True to leave out a smaller last batch.
        total_batches: Number of batches in the whole training. None: no limit.
    """

    samples: int
    batch_size: int
    shuffle: bool
    seed: int
    drop_last: bool
    total_batches: int | None = None

    @property
    def batches(self) -> int:
        """Number of batches in an epoch, without ``total_batches``."""
        whole = self.samples // self.batch_size
        return whole if self.drop_last else math.ceil(self.samples / self.batch_size)

    def batches_of(self, epoch: int) -> int:
        """Return the number of batches in epoch number ``epoch``. 0 if no batch is left."""
        if self.total_batches is None:
            return self.batches
        return max(0, min(self.batches, self.total_batches - epoch * self.batches))

    def range_of(self, batches: int) -> list[Range]:
        """Return the positions of the first ``batches`` batches of an epoch."""
        end = min(batches * self.batch_size, self.samples)
        return [(0, end)] if end > 0 else []

    def order(self, epoch: int) -> npt.NDArray[np.int64]:
        """Return the samples of an epoch in their order, the same as in ``DistributedSampler``."""
        if not self.shuffle:
            return np.arange(self.samples)
        generator = torch.Generator().manual_seed(self.seed + epoch)
        order: npt.NDArray[np.int64] = torch.randperm(
            self.samples, generator=generator, device="cpu"
        ).numpy()
        return order


def chunk_bounds(batches: int, workers: int, least: int = 1) -> list[int]:
    """Return the boundaries of the chunks: chunk c has the batches from bound c to bound c + 1.

    The chunks become shorter towards the end of the epoch (guided self-scheduling): a chunk has
    1/(16·N) of the batches that are left, and at least ``least``. So a slow worker cannot hold a
    long chunk when the others have reached the end.
    """
    bounds = [0]
    while (left := batches - bounds[-1]) > 0:
        bounds.append(bounds[-1] + min(left, max(least, left // (_CHUNKS * workers))))
    return bounds


@dataclass(frozen=True)
class Plan:
    """The plan of one epoch.

    Attributes:
        settings: What determines the order of the samples.
        epoch: Number of the epoch.
        workers: Number of workers when the epoch began.
        ranges: Positions in the shuffled epoch that are to be trained on, ascending. All of them,
            unless a checkpoint was loaded in the middle of the epoch.
        least: Smallest number of batches in a chunk, except the last one (≥ 1).
    """

    settings: Settings
    epoch: int
    workers: int
    ranges: tuple[Range, ...]
    least: int = 1

    def to_text(self) -> str:
        """Return the plan in the form that ``from_text`` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> "Plan":
        """Return the plan that ``to_text`` wrote."""
        values = json.loads(text)
        ranges = tuple((start, end) for start, end in values["ranges"])
        settings = Settings(**values["settings"])
        return cls(settings, values["epoch"], values["workers"], ranges, values["least"])

    @cached_property
    def samples(self) -> npt.NDArray[np.int64]:
        """The samples of ``ranges`` in their order."""
        order = self.settings.order(self.epoch)
        parts = [order[start:end] for start, end in self.ranges]
        return np.concatenate(parts) if parts else order[:0]

    @property
    def length(self) -> int:
        """Number of samples."""
        return sum(end - start for start, end in self.ranges)

    @property
    def batches(self) -> int:
        """Number of batches."""
        return math.ceil(self.length / self.settings.batch_size)

    @cached_property
    def bounds(self) -> Sequence[int]:
        """Boundaries of the chunks; see ``chunk_bounds``."""
        return chunk_bounds(self.batches, self.workers, self.least)

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return len(self.bounds) - 1

    def chunk_batches(self, chunk: int) -> int:
        """Return the number of batches in a chunk."""
        return self.bounds[chunk + 1] - self.bounds[chunk]

    def batch(self, chunk: int, number: int) -> list[int]:
        """Return the samples of batch ``number`` of a chunk, counted from 0."""
        size, batch = self.settings.batch_size, self.bounds[chunk] + number
        indices: list[int] = self.samples[batch * size : (batch + 1) * size].tolist()
        return indices

    def chunk_samples(self, chunk: int) -> int:
        """Return the number of samples in a chunk."""
        size = self.settings.batch_size
        end = min(self.bounds[chunk + 1] * size, self.length)
        return end - self.bounds[chunk] * size

    def left(self, done: Sequence[int]) -> list[Range]:
        """Return the positions that are left, if ``done[c]`` batches of each chunk c are done."""
        size = self.settings.batch_size
        left: list[Range] = []
        for chunk, number in enumerate(done):
            start = (self.bounds[chunk] + number) * size
            end = self.bounds[chunk + 1] * size
            left += self._positions(start, min(end, self.length))
        return merged(left)

    def _positions(self, start: int, end: int) -> list[Range]:
        """Return the positions of the samples from index ``start`` to ``end`` of ``samples``."""
        found, before = [], 0
        for first, last in self.ranges:
            low, high = max(start, before), min(end, before + last - first)
            if low < high:
                found.append((first + low - before, first + high - before))
            before += last - first
        return found

    def progress(self, chunk: int, number: int, last: int) -> float:
        """Return the estimated share of the epoch that all workers have done, in [0, 1].

        It is that after batch ``number`` of a chunk, if all workers are equally fast: they have
        then done as many batches each, since the chunk was taken. The training ends after ``last``
        batches of the epoch.
        """
        done = last - self.batches + self.bounds[chunk] + (number + 1) * self.workers
        return min(last, done) / self.settings.batches


def merged(ranges: Sequence[Range]) -> list[Range]:
    """Return the same positions in as few ascending ranges as possible."""
    result: list[Range] = []
    for start, end in sorted(ranges):
        if result and result[-1][1] == start:
            result[-1] = (result[-1][0], end)
        else:
            result.append((start, end))
    return result
