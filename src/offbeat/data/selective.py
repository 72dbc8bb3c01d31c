"""SelDP: every worker reads all the data, and at any moment no two read the same part."""

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
    """Divide a dataset among workers by rotation; a drop-in for ``DistributedSampler``.

    The indices, shuffled anew in every epoch, are cut into N chunks D_0 … D_{N−1}. Worker n reads:

        D_n, D_{n+1}, …, D_{(n+N−1) mod N}

    so its epoch is a permutation of *all* indices, N times as long as under ``DistributedSampler``,
    and at each position the N workers are in N different chunks. Workers that go on locally for
    many steps then do not specialise on a part of the data (the paper: VGG11 90.86 % with SelDP,
    64.1 % without).

    A length that N does not divide is padded by repeating indices from the start, or cut with
    ``drop_last``, as ``DistributedSampler`` does.

    With a ``partition`` worker n reads its own part alone, all of it once an epoch, shuffled
    differently on each worker and in each epoch. Nothing is padded: the epoch of a worker is as
    long as its part, so workers may take different numbers of steps, as Offbeat allows.

    Args:
        dataset: Anything with a length.
        num_replicas: N; None takes the size of the default process group.
        rank: n, in [0, N); None takes the rank in the default process group.
        shuffle: Shuffle in every epoch.
        seed: Seed of the shuffle, the same on all workers.
        drop_last: Drop the tail instead of padding; not with a partition.
        partition: The indices of each worker, one part a worker, the same list on all workers, as
            ``partition_by_label`` makes it. None divides by rotation.

    Raises:
        RuntimeError: ``num_replicas`` or ``rank`` is None and no process group is initialised.
        TypeError: a part is not a list of integers.
        ValueError: ``rank`` is not in [0, num_replicas), nothing is left after dropping, or the
            partition has another number of parts than there are workers, an empty part, an index
            outside the dataset or one that is there twice.

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
        self.position = 0  # indices of this epoch drawn so far
        self._resume = 0  # where the next iteration starts
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
        """All parts, so that a mistake raises on every worker and none waits for the others."""
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
        """Indices in a whole epoch of one worker: all of them, or its part of a partition."""
        return self._chunk * self.num_replicas if self._part is None else len(self._part)

    def set_epoch(self, epoch: int) -> None:
        """Choose the shuffle. Another epoch than the present one starts at its beginning."""
        if epoch != self.epoch:
            self._resume = 0
        self.epoch = epoch

    def _own(self) -> list[int]:
        """What this worker reads in this epoch."""
        if self._part is None:
            indices = self._indices()
            start = self.rank * self._chunk
            return indices[start:] + indices[:start]
        # Parts are sorted: with one seed, workers would be at the same place of theirs at once.
        random = np.random.default_rng([self.seed % 2**64, _SHUFFLE, self.epoch, self.rank])
        own: list[int] = (random.permutation(self._part) if self.shuffle else self._part).tolist()
        return own

    def _indices(self) -> list[int]:
        """All indices, shuffled, padded or cut: the chunks one after the other."""
        size, total = len(self.dataset), len(self)
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            indices = torch.randperm(size, generator=generator).tolist()
        else:
            indices = list(range(size))
        repeats = math.ceil(total / size)
        return (indices * repeats)[:total]

    def __iter__(self) -> Iterator[int]:
        """The indices of this epoch; the first time after ``load_state_dict``, its remainder."""
        own = self._own()
        first, self._resume = self._resume, 0
        for offset, index in enumerate(own[first:], start=first + 1):
            self.position = offset % len(self)
            yield index

    def state_dict(self, consumed: int | None = None) -> dict[str, Any]:
        """Where this worker stands, to be loaded into a sampler of the same settings.

        With a partition every worker saves its own state: they stand at different places.

        Args:
            consumed: Samples of this epoch that were trained on. A DataLoader with workers or
                prefetching draws indices ahead of training: give ``batches × batch_size`` then.
                None takes what was drawn.
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
        """The next ``iter`` goes on where ``state_dict`` was taken; later ones are whole epochs.

        Raises:
            ValueError: the state is of another seed, number of workers or part.
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
