"""Leased data that can only be read in sequence, such as files."""

import math
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from offbeat.arguments import require_integer
from offbeat.data.leasing.loader import LeasedIterable
from offbeat.data.leasing.sampler import LeasedSampler
from offbeat.synchronizer import Synchronizer

Shard = TypeVar("Shard")
_NONE = object()  # no batch


@dataclass
class _Open:
    """A shard that is being read.

    Attributes:
        batches: The batches that are left, each with True if it is the last one.
        step: Number of local steps when the newest of its batches was handed out. It is trained on
            in the step after that.
        ended: True once the last batch was handed out.
    """

    batches: Iterator[tuple[Any, bool]]
    step: int = -1
    ended: bool = False


class LeasedStream(LeasedIterable):
    """Divides the shards of a dataset among the workers as they train.

    A *shard* is a part of the data that is read from start to end, such as a file. In each epoch
    the workers lease the shards one by one, in a common order, so a faster worker takes more of
    them::

        def read(path):
            return DataLoader(Lines(path), batch_size=32, num_workers=1)

        stream = LeasedStream(paths, read, sync=sync)
        for epoch in range(epochs):
            stream.sampler.set_epoch(epoch)
            for batch in stream:
                ...

    **Guarantees** are those of ``LeasedSampler``, for shards instead of samples. A shard counts as
    used when a mean over the workers contains all of its batches and those of the shards that this
    worker leased before. If a worker is lost earlier, the others read the shard again from its
    start.

    **Reading ahead.** The stream reads one batch ahead in each open shard, in the process of the
    training. If ``read`` returns a DataLoader with ``num_workers=1``, each open shard has a process
    that reads ahead. With ``interleave`` ≥ 2 several of them read at the same time, and a new one
    starts while the others have batches.

    **Limits.**

    - The stream neither shuffles nor batches within a shard, and does not divide a shard.
    - It has no length. ``sampler.progress`` changes at the ends of shards.
    - A checkpoint (``sampler.state_dict``) contains no place within a shard: open shards are read
      again from their start.
    - At the end of training a worker may still have ``interleave`` + 1 shards when another one has
      none, so provide many more shards than workers.

    Args:
        shards: The shards, equal on all workers: paths, URLs, or anything else that ``read`` knows.
        read: Function that opens a shard and returns an iterable of its batches.
        sync: The synchronizer that ``attach`` returned. Its workers share the shards.
        interleave: Number of open shards (≥ 1). The stream takes one batch of each in turn.
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
        interleave: int = 1,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        require_integer("interleave", interleave, least=1)
        self._shards, self._read, self._interleave = shards, read, interleave
        self.sampler = LeasedSampler(shards, 1, sync=sync, shuffle=shuffle, seed=seed)
        self.sampler.count_by_loader(batch_seconds=math.inf)  # much longer than a lease takes
        self._open: dict[Hashable, _Open] = {}  # by the keys of ``LeasedSampler.drawn``

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the batches of the shards that this worker takes in this epoch.

        If the loop is left early, the next iteration continues with the open shards.
        """
        sampler, places, turns = self.sampler, iter(self.sampler), deque[Hashable]()
        while True:
            while len(turns) < self._interleave and (place := next(places, None)) is not None:
                turns.append(self._opened(place[0]))
            if not turns:
                return
            key = turns.popleft()
            shard = self._open.pop(key)  # after an error, the next iteration opens it again
            batch, shard.ended = next(shard.batches, (_NONE, True))
            self._open[key] = shard
            if batch is not _NONE:
                shard.step = sampler.sync.step
            if not shard.ended:
                turns.append(key)
            while sampler.drawn and self._open[sampler.drawn[0]].ended:
                sampler.hand_out(self._open.pop(sampler.drawn[0]).step)
            sampler.acknowledge()
            if batch is not _NONE:
                yield batch

    def _opened(self, place: int) -> Hashable:
        """Open the shard that was drawn last, unless it is open, and return its key."""
        key = self.sampler.drawn[-1]
        if key not in self._open:
            self._open[key] = _Open(_with_last(iter(self._read(self._shards[place]))))
        return key


def _with_last(batches: Iterator[Any]) -> Iterator[tuple[Any, bool]]:
    """Yield each batch, and True if it is the last one."""
    following = next(batches, _NONE)
    while following is not _NONE:
        batch, following = following, next(batches, _NONE)
        yield batch, following is _NONE
