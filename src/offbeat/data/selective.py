"""SelDP: every worker reads the whole dataset, in an order that differs from worker to worker."""

import math
from collections.abc import Iterator, Sized
from typing import Any

import numpy as np
import torch
from torch.utils.data import DistributedSampler
from typing_extensions import override


class SelDPSampler(DistributedSampler[int]):
    """Gives all samples to each worker, in rotated order. A drop-in for ``DistributedSampler``.

    In every epoch the indices are shuffled (unless ``shuffle=False``) and cut into N chunks
    D_0 … D_{N−1} of equal length. Worker n reads them in this order:

        D_n, D_{n+1}, …, D_{N−1}, D_0, …, D_{n−1}

    An epoch of a worker contains *all* chunks, so it is N times as long as with
    ``DistributedSampler``. At any position in the epoch, the N workers read N different chunks.
    Workers that train locally for many steps then do not specialise on a part of the data. The
    paper reports 90.86 % accuracy of VGG11 with SelDP and 64.1 % without.

    *Differs from the paper*: a chunk that was read by another worker earlier in the epoch is
    shuffled again. In the paper's order the N workers together would read the same N samples at the
    same position of every chunk, so each global batch would be repeated N times in an epoch.

    If N does not divide the number of samples, the first indices are repeated at the end, or with
    ``drop_last`` the last indices are dropped, as in ``DistributedSampler``.

    Args:
        dataset: Any object with a length.
        num_replicas: Number of workers N. None: the size of the default process group.
        rank: Rank n of this worker, in [0, N). None: the rank in the default process group.
        shuffle: True to shuffle in every epoch.
        seed: Seed of the shuffle, equal on all workers.
        drop_last: True to drop the last indices instead of repeating the first ones.

    Attributes:
        epoch: Number of the epoch, set by ``set_epoch``.
        position: Number of indices drawn in this epoch so far.

    Raises:
        ValueError: ``rank`` is not in [0, N), a worker would have no samples, or ``num_replicas``
            or ``rank`` is None and no process group is initialised.

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
    ) -> None:
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)  # type: ignore[arg-type]
        if self.num_samples < 1:
            raise ValueError(
                f"{len(dataset)} samples leave nothing for each of {self.num_replicas} workers"
                + (" after drop_last" if drop_last else "")
            )
        self.position = 0
        self._size = len(dataset)
        self._resume = 0  # position at which the next iteration starts

    @override
    def __len__(self) -> int:
        """Number of indices in an epoch of this worker."""
        return self.total_size

    @override
    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which determines the shuffle. A new epoch starts at position 0."""
        if epoch != self.epoch:
            self._resume = self.position = 0
        self.epoch = epoch

    def _indices(self) -> list[int]:
        """Return the indices that this worker reads in this epoch, in order."""
        indices = list(range(self._size))
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            indices = torch.randperm(self._size, generator=generator, device="cpu").tolist()
        whole = (indices * math.ceil(len(self) / self._size))[: len(self)]  # repeated or cut
        order = []
        for earlier in range(self.num_replicas):
            number = (self.rank + earlier) % self.num_replicas
            chunk = whole[number * self.num_samples :][: self.num_samples]
            if self.shuffle and earlier:  # this number of workers read the chunk before
                seed = [self.seed % 2**64, self.epoch, number, earlier]
                chunk = np.random.default_rng(seed).permutation(chunk).tolist()
            order += chunk
        return order

    @override
    def __iter__(self) -> Iterator[int]:
        """Iterate over the epoch's indices, after ``load_state_dict`` over the rest of them."""
        first, self._resume = self._resume, 0
        for offset, index in enumerate(self._indices()[first:], start=first + 1):
            self.position = offset
            yield index

    def state_dict(self, consumed: int | None = None) -> dict[str, Any]:
        """Return the position of this worker. At the end of an epoch it is the start of the next.

        Args:
            consumed: Number of samples of this epoch that were trained on. None: the number of
                indices drawn. A DataLoader with worker processes draws indices ahead of training.
                With such a loader, pass the number of trained batches times the batch size.
        """
        position = self.position if consumed is None else consumed
        ended = position >= len(self)  # the last batch may be smaller than the others
        position = 0 if ended else position
        return {"epoch": self.epoch + ended, "position": position, **self._settings()}

    def _settings(self) -> dict[str, Any]:
        """Return what determines the order of the indices, besides the rank."""
        names = ("seed", "num_replicas", "shuffle", "drop_last")
        return {**{name: getattr(self, name) for name in names}, "samples": self._size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iteration continue from the saved position. Later iterations are complete.

        Raises:
            ValueError: The state has other settings, or another number of samples.
        """
        for name, value in self._settings().items():
            if state[name] != value:
                raise ValueError(
                    f"the state was saved with {name}={state[name]!r}, this sampler has "
                    f"{name}={value!r}"
                )
        self.epoch = state["epoch"]
        self.position = self._resume = state["position"]
