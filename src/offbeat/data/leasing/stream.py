"""Leased data that can only be read in sequence, such as files."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from offbeat.data.leasing.loader import LeasedIterable
from offbeat.data.leasing.sampler import LeasedSampler
from offbeat.synchronizer import Synchronizer

Shard = TypeVar("Shard")
_NONE = object()  # no batch


class LeasedStream(LeasedIterable):
    """Divides the shards of a dataset among the workers as they train.

    A *shard* is a part of the data that is read from start to end, such as a file. In each epoch
    the workers lease the shards in a common order, so a faster worker takes more of them::

        def read(path):
            return DataLoader(Lines(path), batch_size=32, num_workers=1)

        stream = LeasedStream(paths, read, sync=sync)
        for epoch in range(epochs):
            stream.sampler.set_epoch(epoch)
            for batch in stream:
                ...

    **Guarantees** are those of ``LeasedSampler``, for shards instead of samples. If a worker is
    lost, the others read its shards again from the start, unless a mean over the workers contains
    all of their batches.

    **Limits.**

    - The stream neither shuffles nor batches within a shard, and does not divide a shard.
    - It has no length. ``sampler.progress`` changes at the ends of shards.
    - A shard that is not read to its end is read again from its start: after an error, after the
      loop is left early, and after a restart from a checkpoint (``sampler.state_dict``).
    - At the end of training a worker may still have two shards when another one has none, so
      provide many more shards than workers.

    Args:
        shards: The shards, equal on all workers: paths, URLs, or anything else that ``read`` knows.
        read: Function that opens a shard and returns an iterable of its batches. The stream reads
            one batch ahead.
        sync: The synchronizer that ``attach`` returned. Its workers share the shards.
        shuffle: True to shuffle the shards in every epoch.
        seed: Seed of the shuffle, equal on all workers.

    Attributes:
        sampler: The ``LeasedSampler`` of the shards. Each shard is one sample and one batch of it.

    Raises:
        TypeError, ValueError, AttachError, OffbeatError: see ``LeasedSampler``.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        read: Callable[[Shard], Iterable[Any]],
        *,
        sync: Synchronizer,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        self._shards, self._read = shards, read
        self.sampler = LeasedSampler(shards, 1, sync=sync, shuffle=shuffle, seed=seed)
        self.sampler.count_by_loader(batch_seconds=math.inf)  # much longer than a lease takes

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the batches of the shards that this worker takes in this epoch."""
        for (place,) in self.sampler:
            batch: Any = _NONE
            for following in self._read(self._shards[place]):
                if batch is not _NONE:
                    self.sampler.acknowledge()
                    yield batch
                batch = following
            self.sampler.hand_out()  # with the last batch
            if batch is not _NONE:
                yield batch
