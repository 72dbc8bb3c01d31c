"""SelDP: every worker reads all data, in a different order, so that no two read the same chunk."""

import math
import zlib
from collections.abc import Iterator, Sequence, Sized
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from offbeat.data.partition import Indices, Share, check_parts

_SHUFFLE = 3  # the purpose in (seed, purpose, epoch, rank)


class SelDPSampler(Sampler[int]):
    """Divides a dataset among workers by rotation. A drop-in for ``DistributedSampler``.

    The indices are shuffled in every epoch and cut into N chunks D_0 … D_{N−1}. Worker n reads:

        D_n, D_{n+1}, …, D_{(n+N−1) mod N}

    An epoch of a worker is therefore a permutation of *all* indices, N times as long as with
    ``DistributedSampler``, and at each position the N workers are in N different chunks. Workers
    that train locally for many steps then do not specialise on a part of the data (the paper: VGG11
    90.86 % with SelDP, 64.1 % without).

    If N does not divide the length, indices from the start are repeated, or the tail is dropped
    with ``drop_last``, as in ``DistributedSampler``.

    With a ``partition``, worker n reads only its own part, once per epoch, shuffled differently by
    each worker and in each epoch. Nothing is padded: an epoch of a worker is as long as its part,
    so workers may take different numbers of steps, which Offbeat supports.

    Args:
        dataset: Any object with a length.
        num_replicas: Number of workers N; None is the size of the default process group.
        rank: Rank n of this worker, in [0, N); None is the rank in the default process group.
        shuffle: True to shuffle in every epoch.
        seed: Seed of the shuffle, the same on all workers.
        drop_last: True to drop the tail rather than pad. Not with a partition.
        partition: Sample indices of each worker, the same list on all workers, such as the result
            of ``partition_by_label``; None divides by rotation.

    Attributes:
        epoch: Number of the epoch, set by ``set_epoch``.
        position: Number of indices of this epoch drawn so far.

    Raises:
        RuntimeError: ``num_replicas`` or ``rank`` is None and no process group is initialised.
        TypeError: A part is not a list of integers.
        ValueError: ``rank`` is not in [0, num_replicas); nothing is left after dropping; or the
            partition has the wrong number of parts, an empty part, an index outside the dataset, or
            an index twice.

    Source: Tyagi & Swany, arXiv 2307.07950, §III-D.
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        partition: Sequence[Share] | None = None,
    ) -> None:
        if num_replicas is None or rank is None:
            if not (dist.is_available() and dist.is_initialized()):
                raise RuntimeError(
                    "SelDPSampler needs num_replicas and rank when torch.distributed is not "
                    "initialised"
                )
            num_replicas = dist.get_world_size() if num_replicas is None else num_replicas
            rank = dist.get_rank() if rank is None else rank
        if not 0 <= rank < num_replicas:
            raise ValueError(f"rank must be in [0, {num_replicas}), got {rank}")
        self.dataset, self.num_replicas, self.rank = dataset, num_replicas, rank
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.epoch = 0
        self.position = 0
        self._resume = 0  # position at which the next iteration starts
        self._part = None if partition is None else self._check(partition)[rank]
        self._chunk = self._chunk_size() if partition is None else 0

    def _chunk_size(self) -> int:
        size, workers = len(self.dataset), self.num_replicas
        chunk = size // workers if self.drop_last else math.ceil(size / workers)
        if chunk == 0:
            raise ValueError(
                f"{size} samples leave nothing for each of {workers} workers"
                + (" after drop_last" if self.drop_last else "")
            )
        return chunk

    def _check(self, partition: Sequence[Share]) -> list[Indices]:
        """Check all parts, so that a mistake raises on every worker and no worker waits."""
        if len(partition) != self.num_replicas:
            raise ValueError(
                f"the partition must have one part for each of {self.num_replicas} workers, got "
                f"{len(partition)}"
            )
        if self.drop_last:
            raise ValueError(
                "drop_last cuts chunks to one length, and parts have their own: leave it out with "
                "a partition"
            )
        parts = check_parts(partition, len(self.dataset))
        for number, part in enumerate(parts):
            if len(part) == 0:
                raise ValueError(
                    f"every worker needs samples, part {number} of the partition has none; use "
                    "fewer workers or another partition"
                )
        return parts

    def __len__(self) -> int:
        """Number of indices in an epoch of this worker."""
        return self._chunk * self.num_replicas if self._part is None else len(self._part)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which determines the shuffle. A new epoch starts at its beginning."""
        if epoch != self.epoch:
            self._resume = 0
        self.epoch = epoch

    def _own(self) -> list[int]:
        """Return the indices that this worker reads in this epoch, in order."""
        if self._part is None:
            indices = self._indices()
            start = self.rank * self._chunk
            return indices[start:] + indices[:start]
        # The rank is part of the seed. Parts are sorted, so with one seed all workers would read
        # the same places of their parts at the same time.
        random = np.random.default_rng([self.seed % 2**64, _SHUFFLE, self.epoch, self.rank])
        own: list[int] = (random.permutation(self._part) if self.shuffle else self._part).tolist()
        return own

    def _indices(self) -> list[int]:
        """Return all indices, shuffled, then padded or cut: the sequence of all chunks."""
        size, total = len(self.dataset), len(self)
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            indices = torch.randperm(size, generator=generator).tolist()
        else:
            indices = list(range(size))
        repeats = math.ceil(total / size)
        return (indices * repeats)[:total]

    def __iter__(self) -> Iterator[int]:
        """Iterate over this epoch; right after ``load_state_dict``, over its remainder."""
        own = self._own()
        first, self._resume = self._resume, 0
        for offset, index in enumerate(own[first:], start=first + 1):
            self.position = offset % len(self)
            yield index

    def state_dict(self, consumed: int | None = None) -> dict[str, Any]:
        """Return the position of this worker, to be loaded by a sampler with the same settings.

        With a partition every worker saves its own state, because positions differ.

        Args:
            consumed: Number of samples of this epoch that were trained on; None is the number of
                indices drawn. A DataLoader with worker processes or prefetching draws indices ahead
                of training; pass ``batches × batch_size`` in that case.
        """
        position = self.position if consumed is None else consumed % len(self)
        state = {
            "epoch": self.epoch,
            "position": position,
            "seed": self.seed,
            "num_replicas": self.num_replicas,
        }
        if self._part is not None:
            state["part"] = zlib.crc32(self._part.data)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iteration continue from the saved position. Later ones are whole epochs.

        Raises:
            ValueError: The state has another seed, number of workers, or part.
        """
        for name in ("seed", "num_replicas"):
            if state[name] != getattr(self, name):
                raise ValueError(
                    f"the state was saved with {name}={state[name]}, this sampler has "
                    f"{name}={getattr(self, name)}"
                )
        part = None if self._part is None else zlib.crc32(self._part.data)
        if state.get("part") != part:
            raise ValueError(
                f"the state was saved with another part of the data than worker {self.rank} has; "
                "use the partition of that run, and for each worker its own state"
            )
        self.epoch = state["epoch"]
        self.position = self._resume = state["position"]
