"""A batch sampler whose workers lease chunks of every epoch, each as many as it can train on."""

import math
from collections import deque
from collections.abc import Iterator, Sized
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Sampler

from offbeat.arguments import require_integer
from offbeat.data.leasing.access import (
    open_board,
    prepare_collectives,
    share_with_joining,
    synced_step_of,
    team_of,
)
from offbeat.data.leasing.leases import Lease, Leases
from offbeat.data.leasing.plan import Plan, Settings
from offbeat.data.leasing.prefetch import Prefetch
from offbeat.data.leasing.saving import gather_left
from offbeat.synchronizer import Synchronizer


@dataclass(frozen=True, eq=False)
class _Batch:
    """A batch that was drawn: batch ``number`` of a chunk, from 0."""

    lease: Lease
    number: int


@dataclass
class _Use:
    """How much of a chunk was handed out to the training loop.

    Attributes:
        batches: Number of batches that were handed out.
        step: Number of local steps when the newest of them was handed out. It is trained on in the
            step after that.
        earlier: Number of these batches that were handed out when fewer steps had been taken.
    """

    batches: int = 0
    step: int = -1
    earlier: int = 0

    def add(self, step: int) -> None:
        """Count a batch that is handed out after ``step`` local steps."""
        if step > self.step:
            self.earlier, self.step = self.batches, step
        self.batches += 1

    def used(self, step: int) -> int:
        """Return the number of batches that were trained on in a step up to ``step``.

        For a step before the newest batch, the result may be too small.
        """
        return self.batches if self.step < step else self.earlier


class LeasedSampler(Sampler[list[int]]):
    """Divides each epoch among the workers as they train: a faster worker takes more batches.

    The samples of an epoch are shuffled, in the same way on all workers, and cut into chunks of
    consecutive batches. A worker leases a chunk from the store that the workers share when it needs
    one, a little ahead of use and in the background. The chunks become shorter towards the end of
    an epoch, but not so short that the store could not keep up. A worker that finds no chunk left
    continues with the next epoch and does not wait.

    **Guarantees.** If no worker is lost, every sample is used exactly once per epoch, by one
    worker. In elastic training (``min_workers``), the others also train on the chunks that a lost
    worker had leased, unless a mean over the workers already contains them. A part of such a chunk
    may then be used twice; ``repeated`` counts these samples. Chunks of a worker whose loss is
    noticed after the end of the epoch come first in the next one; see ``LeasedLoader.leftovers``
    for the last epoch. A step that a view change makes a worker skip is not repeated.

    **Use** as a batch sampler, with a ``LeasedLoader`` around the DataLoader, which tells the
    sampler which batches were trained on::

        sampler = LeasedSampler(dataset, batch_size=32, sync=sync)
        loader = LeasedLoader(DataLoader(dataset, batch_sampler=sampler))
        for epoch in range(sampler.epoch, epochs):
            sampler.set_epoch(epoch)
            for batch in loader:
                ...

    **Steps.** Workers take different numbers of steps, so a schedule of the learning rate should
    follow ``progress``. Strategies that wait for all workers in every round keep the workers in
    lock step, so the workers take equal shares again.

    Args:
        dataset: Any object with a length.
        batch_size: Number of samples in a batch (≥ 1).
        sync: The synchronizer that ``attach`` returned. Its workers share the samples.
        shuffle: True to shuffle in every epoch, in the order of ``DistributedSampler``.
        seed: Seed of the shuffle, equal on all workers.
        drop_last: True to leave out the last batch of an epoch if it is smaller.
        total_batches: Number of batches that all workers use together in the whole training. The
            epochs end when they are used up. None: no limit.

    Attributes:
        sync: The synchronizer.
        epoch: Number of the epoch of the next iteration. An iteration to the end adds 1.
            A worker that joins a training starts from the epoch that the others train on.
        batches: Number of batches that all workers use together in an epoch.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of its range, or an epoch has no batch.
        AttachError: After ``finish`` or ``detach``, or the synchronizer has nodes of workers.
        OffbeatError: The workers have no store, as with a custom ``Transport``.

    All workers create their samplers in the same order. If the settings differ between workers, the
    first iteration raises a ``MismatchError``.

    *Communication*: two round trips to the store for each chunk, and one when the chunk is done, in
    the background. The messages have less than 100 bytes for each chunk in hand.
    """

    def __init__(
        self,
        dataset: Sized,
        batch_size: int,
        *,
        sync: Synchronizer,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        total_batches: int | None = None,
    ) -> None:
        require_integer("batch_size", batch_size, least=1)
        require_integer("seed", seed, least=0)
        if total_batches is not None:
            require_integer("total_batches", total_batches, least=1)
        samples = len(dataset)
        self._settings = Settings(samples, batch_size, shuffle, seed, drop_last, total_batches)
        self.batches = self._settings.batches
        if not self.batches:
            dropped = " after drop_last" if drop_last else ""
            raise ValueError(f"{samples} samples give no batch of {batch_size}{dropped}")
        self.epoch = 0
        self.sync = sync
        board = open_board(sync, "LeasedSampler", lambda: self._prefetch.stop())
        team = self._team = team_of(sync)
        self._leases = Leases(board, team.identity, self._propose)
        self._prefetch = Prefetch(self._leases, team, self._lost_workers)
        self._lease: tuple[Lease, int] | None = None  # chunk in hand, and its next batch
        self._drawn: deque[_Batch] = deque()  # drawn and not handed out
        self._again: deque[_Batch] = deque()  # drawn, and never handed out: to be drawn again
        self._uses: dict[Lease, _Use] = {}  # chunks that are not acknowledged, in order of use
        self._reclaimed: Lease | None = None  # chunk of the next iteration; see ``reclaim``
        self._largest = 0  # largest number of a member so far
        self._begun: int | None = None  # number of the epoch that was begun last
        self._ended = -1  # number of the last epoch whose batches were all drawn
        self._progress = 0.0
        self._counted_by_loader = False
        share_with_joining(sync, self._training_epoch, self._start_from)

    # -- epochs ----------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of batches in an epoch of this worker if all are equally fast."""
        return math.ceil(self.batches / self._team.size)

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch, which determines the shuffle.

        Raises:
            ValueError: The samples of this epoch are used up.
        """
        require_integer("epoch", epoch, least=0)
        if epoch <= self._ended:
            raise ValueError(
                f"epoch {epoch} is used up, the next one is {self._ended + 1}: create a new "
                "LeasedSampler to train on it again"
            )
        self.epoch = epoch

    def _training_epoch(self) -> int:
        """Return the epoch that was begun last, from which a worker that joins starts.

        The scripts of all workers may enter ``consensus`` after each epoch. A worker that joins
        while the others wait there has to enter this consensus, too, so it starts from the epoch
        that they have just ended, although no chunk of it is left.
        """
        return self.epoch if self._begun is None else self._begun

    def _start_from(self, epoch: int) -> None:
        """Start from an epoch."""
        self.epoch, self._progress = epoch, float(epoch)

    def __iter__(self) -> Iterator[list[int]]:
        """Iterate over the batches of this worker, as lists of samples. Blocks if none is ready."""
        self._again.extendleft(reversed(self._drawn))
        self._drawn.clear()
        if self._reclaimed is not None:
            lease, self._reclaimed = self._reclaimed, None
            yield from (self._draw(_Batch(lease, number)) for number in range(lease.batches))
            return
        epoch = self._begun = self.epoch
        self._prefetch.begin(epoch)
        while (batch := self._next()) is not None:
            yield self._draw(batch)
        self._ended = max(self._ended, epoch)
        self.epoch = epoch + 1

    def _draw(self, batch: _Batch) -> list[int]:
        self._drawn.append(batch)
        if not self._counted_by_loader:
            self.hand_out()
        return batch.lease.batch(batch.number)

    def _next(self) -> _Batch | None:
        if self._again:
            return self._again.popleft()
        if self._lease is None:
            lease = self._prefetch.take()
            if lease is None:
                return None
            self._lease = lease, 0
        lease, number = self._lease
        self._lease = (lease, number + 1) if number + 1 < lease.batches else None
        self._prefetch.drawn()
        return _Batch(lease, number)

    @property
    def progress(self) -> float:
        """Estimated number of epochs that all workers together have done.

        It belongs to the newest batch and increases with each batch, on every worker at about the
        same time. It is an estimate, because the other workers are in the middle of their chunks.
        """
        return self._progress

    @property
    def repeated(self) -> int:
        """Number of samples in the chunks that this worker has taken over from lost workers.

        A lost worker may have used them before.
        """
        return self._leases.repeated

    # -- what was trained on ---------------------------------------------------------------------

    def count_by_loader(self, batch_seconds: float | None = None) -> None:
        """Let a loader call ``hand_out``. Otherwise every batch is handed out when it is drawn.

        ``batch_seconds``: estimated time to train on a batch, until the sampler has measured it.
        """
        self._counted_by_loader = True
        if batch_seconds is not None:
            self._prefetch.step_seconds = batch_seconds

    def hand_out(self) -> None:
        """Handle a batch, the oldest one drawn, that the training loop receives now."""
        self._prefetch.used()
        batch = self._drawn.popleft()
        lease, number = batch.lease, batch.number
        number += lease.first
        share = lease.plan.progress(lease.chunk, number, self._settings.batches_of(lease.epoch))
        self._progress = max(self._progress, lease.epoch + share)
        self.acknowledge()
        self._uses.setdefault(lease, _Use()).add(self.sync.step)

    def acknowledge(self) -> None:
        """Acknowledge the chunks that a mean contains. ``hand_out`` calls it. Never blocks."""
        self._acknowledge(synced_step_of(self.sync))

    def _acknowledge(self, step: int) -> None:
        """Acknowledge the chunks that were trained on completely in steps up to ``step``."""
        for lease, use in [*self._uses.items()]:
            if use.used(step) == lease.batches:
                del self._uses[lease]
                self._prefetch.finish(lease)

    # -- lost workers ----------------------------------------------------------------------------

    def _lost_workers(self) -> set[int]:
        """Return the numbers of all workers that have left the training.

        Numbers ascend in the order of joining, so that every number below the largest member is
        that of a member or of a worker that was lost or refused.
        """
        members = self._team.members
        self._largest = max(self._largest, *members)
        return set(range(self._largest + 1)).difference(members)

    def reclaim(self) -> bool:
        """Lease a chunk that a lost worker has left. The next iteration has its batches alone.

        Call it when the models of all workers contain all steps of this worker.

        Returns:
            True if there was such a chunk.
        """
        self._acknowledge(self.sync.step + 1)  # also batches without a step
        self._reclaimed = self._prefetch.call(self._find_left_chunk)
        return self._reclaimed is not None

    def _find_left_chunk(self) -> Lease | None:
        self._leases.lose(self._lost_workers())
        self._leases.look_again()
        ready = self._prefetch.take_ready(self._ended)  # reclaimed after the epoch
        return ready or self._leases.reclaim(self._ended)

    def give_back(self) -> None:
        """Return all chunks, and what is left of those in use, before this worker leaves.

        Call it when the models of all workers contain all steps of this worker.
        """
        self._acknowledge(self.sync.step)
        used = self._used_batches(self.sync.step)
        self._prefetch.call(lambda: self._leases.give_back(used))

    def _used_batches(self, step: int) -> dict[tuple[int, int], int]:
        """Return for each chunk in use how many of its batches were trained on up to ``step``."""
        uses = self._uses.items()
        return {(each.epoch, each.chunk): each.first + use.used(step) for each, use in uses}

    def outstanding(self) -> set[tuple[int, int, str]]:
        """Return the chunks of ended epochs that members hold; see ``Leases.outstanding``."""
        members, ended = self._team.members, self._ended
        return self._prefetch.call(lambda: self._leases.outstanding(members, ended))

    # -- plans and checkpoints -------------------------------------------------------------------

    def _propose(self, epoch: int) -> Plan:
        """Return this worker's proposal for the plan of an epoch."""
        settings = self._settings
        ranges = settings.range_of(settings.batches_of(epoch))
        size, least = self._team.size, self._prefetch.least_chunk
        return Plan(settings, epoch, size, tuple(ranges), least)

    def state_dict(self) -> dict[str, Any]:
        """Return the samples that are left, the same on all workers, for a checkpoint.

        A collective. All workers call it at the same step, or inside ``sync.consensus()``, where
        they may have taken different numbers of steps. Every batch that was handed out counts as
        used if the worker has taken a step since. Any number of workers can continue from the
        state.

        Raises:
            AttachError: after ``finish`` or ``detach``, or in the middle of an iteration.
            CheckpointError: inside ``consensus``, and another worker has called ``finish``.
        """
        prepare_collectives(self.sync, "LeasedSampler.state_dict()")
        self._prefetch.call(lambda: self._leases.lose(self._lost_workers()))
        used = self._used_batches(self.sync.step)
        epoch, left = gather_left(self._team, self._leases, self._prefetch, used, self.epoch)
        return {
            **vars(self._settings),
            "epoch": epoch,
            "left": {str(number): ranges for number, ranges in left.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a result of ``state_dict``. All workers call it before their first epoch.

        Then iterate from the epoch ``sampler.epoch`` on.

        Raises:
            ValueError: The state has other settings than this sampler, or an epoch has begun.
        """
        if self._begun is not None:
            raise ValueError("load_state_dict() after the first epoch has begun: call it before")
        for name, value in vars(self._settings).items():
            if state.get(name) != value:
                raise ValueError(
                    f"the state was saved with {name}={state.get(name)!r}, this sampler has "
                    f"{name}={value!r}"
                )
        self._start_from(state["epoch"])
        self._ended = self.epoch - 1
        self._prefetch.call(lambda: self._leases.resume(self.epoch, state["left"]))
