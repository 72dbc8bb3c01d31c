"""A batch sampler whose workers take as many batches of each epoch as they can train on."""

import math
from array import array
from collections.abc import Collection, Iterable, Iterator, Sized
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Sampler

from offbeat.arguments import require_integer
from offbeat.data.leases import Leases, Numbers, Ranges, to_numbers, to_ranges
from offbeat.errors import AttachError
from offbeat.synchronizer import Synchronizer, between_steps, components_of, pass_barrier


class LeasedSampler(Sampler[list[int]]):
    """Divides each epoch among the workers as they train: a faster worker takes more batches.

    The samples of an epoch are shuffled, in the same way on all workers, and cut into batches.
    Each worker takes chunks of consecutive batches from a queue in the store that the workers
    share. It fetches the next chunk in the background while it trains on the one before. The chunks
    become shorter towards the end of an epoch. A worker that finds the queue empty continues with
    the next epoch and does not wait.

    **Guarantees.** If no worker is lost, every sample is used exactly once per epoch, by one
    worker. In *elastic training* (``min_workers``) every sample is used at least once per epoch:
    the workers wait for each other at the end of an epoch, as in a ``consensus``, and train on the
    chunks that lost workers had taken and not completed. Some of these samples may be used
    twice; ``repeated`` counts them. If a worker is lost, its steps since the last mean are lost. A
    membership change can also make a worker skip a step. Lost steps are not repeated.

    **Use** as a batch sampler, with a ``LeasedLoader`` around the DataLoader, which tells the
    sampler which batches were trained on::

        sampler = LeasedSampler(dataset, batch_size=32, sync=sync)
        loader = LeasedLoader(DataLoader(dataset, batch_sampler=sampler))
        for epoch in range(sampler.epoch, epochs):
            sampler.set_epoch(epoch)
            for batch in loader:
                ...

    **Steps.** Workers take different numbers of steps, so a schedule of the learning rate should
    follow ``progress``. Under strategies that wait for all workers in every round, the workers take
    equal shares again.

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
        repeated: Number of samples that this worker has taken over from lost workers. A lost worker
            may have used them before.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of its range, or an epoch has no batch.
        AttachError: After ``finish`` or ``detach``, without a ``LeasedLoader``, or the synchronizer
            has nodes of workers.
        OffbeatError: The workers have no store, as with a custom ``Transport``.

    All workers create their samplers in the same order. If the settings differ between workers, the
    first iteration raises a ``MismatchError``. If the store does not answer within
    ``timeout_seconds``, an iteration raises a ``CommunicationError``.

    *Communication*: one round trip to the store for each chunk, in the background except for the
    first one of an epoch. In elastic training also a barrier, and a few round trips for each
    worker, at the end of an epoch.
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
        self.batches = samples // batch_size if drop_last else math.ceil(samples / batch_size)
        if not self.batches:
            dropped = " after drop_last" if drop_last else ""
            raise ValueError(f"{samples} samples give no batch of {batch_size}{dropped}")
        # What determines the batches of every epoch. Equal on all workers.
        self._settings: dict[str, Any] = {
            "samples": samples,
            "batch_size": batch_size,
            "shuffle": shuffle,
            "seed": seed,
            "drop_last": drop_last,
            "total_batches": total_batches,
        }
        components = components_of(sync, "LeasedSampler")
        team = self._team = components.team
        if team.node is not None:
            raise AttachError(
                "LeasedSampler with node_group: the workers of a node must take equally many "
                "steps; give them equal shares of the data"
            )
        self.sync, self.epoch, self.repeated = sync, 0, 0
        self._elastic = components.membership_changes is not None
        store = team.communicator.store(f"LeasedSampler/{components.leased_sampler_count}")
        self._leases = Leases(team, store, elastic=self._elastic)
        components.leased_sampler_count += 1
        self._resumed: dict[int, Ranges] = {}  # unused batches of a loaded checkpoint, by epoch
        self._order = torch.empty(0)  # samples of the epoch in progress
        # The batches of this epoch that this worker has taken, each with its progress. The first
        # ``_handed_out`` have reached the loop, and the first ``_trained`` were trained on.
        self._taken, self._progress_of = array("q"), array("d")
        self._handed_out = self._trained = 0
        self._handed_out_at = 0  # number of steps before the newest batch was handed out
        self._done: dict[int, Ranges] = {}  # batches that were trained on, by epoch
        self._ended = -1  # number of the last epoch that was used up
        self._progress = 0.0
        self._has_loader = False
        if not components.unfinished.steps:
            sync.share_state(self._values_for_joining, self._join)

    # -- epochs ----------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of batches in an epoch of this worker if all are equally fast."""
        return math.ceil(self.batches / self._team.size)

    @property
    def progress(self) -> float:
        """Estimated number of epochs that all workers together have done.

        It belongs to the newest batch and increases with each batch, on every worker at about the
        same time. It is an estimate, because the other workers are in the middle of their chunks.
        """
        return self._progress

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

    def _values_for_joining(self) -> dict[str, Any]:
        """Return what a worker that joins needs: the epoch that was begun last, and ``_resumed``.

        The scripts of all workers may enter ``consensus`` after each epoch. A worker that joins
        while the others wait there has to enter this consensus, too. So it starts from the epoch
        that they have just ended, although no batch of it is left.
        """
        epoch = self.epoch if self._leases.epoch < 0 else self._leases.epoch
        return {"epoch": epoch, "resumed": self._resumed}

    def _join(self, values: dict[str, Any]) -> None:
        self.epoch, self._resumed = values["epoch"], values["resumed"]
        self._progress = float(self.epoch)

    def __iter__(self) -> Iterator[list[int]]:
        """Iterate over the batches of this worker, as lists of samples. Blocks if none is ready.

        After an iteration that was left early, the next one of the same epoch continues it.
        """
        if not self._has_loader:
            raise AttachError(
                "a LeasedSampler needs a LeasedLoader around the DataLoader, which tells it what "
                "was trained on: LeasedLoader(DataLoader(dataset, batch_sampler=sampler))"
            )
        if self._leases.epoch != self.epoch:
            self._begin(self.epoch)
        size, drawn = self._settings["batch_size"], self._handed_out
        while drawn < len(self._taken) or self._take():
            number = self._taken[drawn]
            drawn += 1
            yield self._order[number * size : (number + 1) * size].tolist()

    def _begin(self, epoch: int) -> None:
        if self._leases.epoch < 0:
            self._leases.require_equal(str(self._settings))
        self._note_done()
        self._taken, self._progress_of = array("q"), array("d")
        self._handed_out = self._trained = 0
        self._order = self._order_of(epoch)
        self._leases.begin(epoch, 0, self._batches_of(epoch))

    def _order_of(self, epoch: int) -> Tensor:
        """Return the samples in the order of an epoch, which is that of DistributedSampler."""
        settings = self._settings
        if not settings["shuffle"]:
            return torch.arange(settings["samples"], device="cpu")
        generator = torch.Generator().manual_seed(settings["seed"] + epoch)
        return torch.randperm(settings["samples"], generator=generator, device="cpu")

    def _number_of(self, epoch: int) -> int:
        """Return the number of batches in an epoch. 0 if ``total_batches`` are used up."""
        total = self._settings["total_batches"]
        left = self.batches if total is None else total - epoch * self.batches
        return max(0, min(self.batches, left))

    def _batches_of(self, epoch: int) -> Numbers:
        return to_numbers(self._resumed.get(epoch, [[0, self._number_of(epoch)]]))

    # -- batches ---------------------------------------------------------------------------------

    def _take(self) -> bool:
        """Take the next chunk. Returns False if there is none. Blocks until it is there."""
        components_of(self.sync, "LeasedSampler")  # raises after the end of training
        leases = self._leases
        epoch = leases.epoch
        position, chunk = leases.take(self._note_done())
        last = self._number_of(epoch)
        # Assumes that each worker has trained on as many batches of its chunk as this one.
        of_all = self._team.size * np.arange(1, len(chunk) + 1)
        done = last - len(leases.batches) + position + of_all
        self._taken.extend(chunk.tolist())
        self._progress_of.extend((epoch + np.minimum(last, done) / self.batches).tolist())
        if leases.number:
            size, samples = self._settings["batch_size"], self._settings["samples"]
            self.repeated += int(np.minimum(size, samples - size * chunk).sum())
        return bool(chunk.size)

    def hand_out(self) -> None:
        """Note that the training loop receives a batch, the oldest one drawn. Never blocks."""
        self._note_step()
        self._progress = max(self._progress, self._progress_of[self._handed_out])
        self._handed_out += 1

    def _note_step(self) -> None:
        """Count the batches that were handed out before the newest step as trained on."""
        if self.sync.step > self._handed_out_at:
            self._trained = self._handed_out
        self._handed_out_at = self.sync.step

    def _note_done(self) -> Ranges:
        """Return the batches of this epoch that were trained on, and note them in ``_done``."""
        done = self._done[self._leases.epoch] = to_ranges(self._taken[: self._trained])
        return done

    # -- the end of an epoch ---------------------------------------------------------------------

    def end_queue(self) -> bool:
        """Handle the end of the queue, after training on all batches of this worker.

        In elastic training it waits until all workers have done so. Returns True if the next
        iteration has batches of the same epoch, which lost workers have left.
        """
        leases = self._leases
        epoch = leases.epoch
        self._trained = self._handed_out  # also batches without a step
        done = self._note_done()
        if self._elastic and (left := self._agree_on_left(done, self._batches_of(epoch))).size:
            leases.begin(epoch, leases.number + 1, left)
            return True
        self._ended, self.epoch = epoch, epoch + 1
        return False

    def _agree_on_left(self, done: Ranges, whole: Numbers) -> Numbers:
        """Return the batches that lost workers have taken and not completed, equal on all workers.

        In ``pass_barrier`` this worker takes part in the rounds of the workers that still train. It
        does not prove that all workers have reached the end, because a worker may evaluate in a
        consensus in the middle of the epoch. The reports prove it.
        """
        members: Collection[int] | None = None
        while (left := self._leases.agree_on_left(done, whole, members)) is None:
            pass_barrier(self.sync)
            # A worker that has called ``finish`` takes no further batch: do not wait for it.
            complete = components_of(self.sync, "LeasedSampler").consensus.complete
            members = self._team.members if complete else ()
        return left

    # -- checkpoints -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the batches that are left, the same on all workers, for a checkpoint.

        A collective: all workers call it, each after any number of steps, inside or outside of
        ``sync.consensus()``. Outside, it enters one. A batch that was handed out counts as used if
        the worker has taken a step since. Any number of workers can continue from the state.

        Raises:
            AttachError: after ``finish`` or ``detach``, or in the middle of an iteration.
            CheckpointError: another worker has called ``finish``.
            CommunicationError: a worker was lost meanwhile.
        """
        what = "LeasedSampler.state_dict()"
        if not components_of(self.sync, what).iteration.shows_consensus:
            with self.sync.consensus():
                return self.state_dict()
        with between_steps(self.sync, what):
            return self._collect()

    def _collect(self) -> dict[str, Any]:
        """Return the state. A collective."""
        self._note_step()
        self._note_done()
        gather = partial(self._team.communicator.gather_values, what="data in use")
        epochs = gather(self._leases.epoch if self._leases.epoch > self._ended else self.epoch)
        span = range(min(epochs), max([*epochs, *self._resumed]) + 1)
        every = gather([self._done.get(epoch, []) for epoch in span])
        left: dict[int, Ranges] = {}
        for epoch, *parts in zip(span, *every, strict=True):
            done = to_numbers(each for ranges in parts for each in ranges)
            if self._elastic:  # what lost workers have done
                done = np.union1d(done, self._leases.reported(epoch))
            left[epoch] = to_ranges(np.setdiff1d(self._batches_of(epoch), done))
        return {
            **self._settings,
            "epoch": next((epoch for epoch in span if left[epoch]), span[-1]),
            "left": {str(epoch): ranges for epoch, ranges in left.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a result of ``state_dict``. All workers call it before their first epoch.

        Then iterate from the epoch ``sampler.epoch`` on.

        Raises:
            ValueError: The state has other settings than this sampler, or an epoch has begun.
        """
        if self._leases.epoch >= 0:
            raise ValueError("load_state_dict() after the first epoch has begun: call it before")
        for name, value in self._settings.items():
            if state.get(name) != value:
                raise ValueError(
                    f"the state was saved with {name}={state.get(name)!r}, this sampler has "
                    f"{name}={value!r}"
                )
        resumed = {int(epoch): ranges for epoch, ranges in state["left"].items()}
        self._join({"epoch": state["epoch"], "resumed": resumed})
        self._ended = self.epoch - 1


class LeasedLoader(Iterable[Any]):
    """Wraps a DataLoader whose batches come from a ``LeasedSampler``.

    A DataLoader with worker processes (``num_workers``) draws batches from the sampler ahead of
    use. This class tells the sampler which of them the training loop has received, so that others
    do not count as used. A fast worker may end earlier than a slow one, by up to the number of
    batches that the slow one has read ahead.

    In elastic training, an iteration ends when all workers have used the samples of the epoch, and
    also those that lost workers have left. All workers iterate to the end. They call ``consensus``
    equally often, and enter other collectives only between two epochs.

    Args:
        loader: A DataLoader with ``batch_sampler=sampler``, or with ``batch_size=None`` and
            ``sampler=sampler``.

    Attributes:
        loader: The wrapped loader.
        sampler: Its ``LeasedSampler``.

    Raises:
        TypeError: The loader does not take its batches from a ``LeasedSampler``.
        ValueError: The loader returns the batches in another order.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        sampler = getattr(loader, "batch_sampler", None)
        if sampler is None:  # with batch_size=None
            sampler = getattr(loader, "sampler", None)
        if not isinstance(sampler, LeasedSampler):
            raise TypeError(
                "loader must be a DataLoader with batch_sampler=LeasedSampler(…), or with "
                "batch_size=None and sampler=LeasedSampler(…), got "
                f"{type(loader).__name__} with {sampler!r}"
            )
        if getattr(loader, "num_workers", 0) and not getattr(loader, "in_order", True):
            raise ValueError("in_order=False changes the order of the batches: leave it out")
        self.loader, self.sampler = loader, sampler
        sampler._has_loader = True

    def __len__(self) -> int:
        """Return the number of batches in an epoch of this worker if all are equally fast."""
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the batches that this worker takes in this epoch."""
        more = True
        while more:
            for batch in self.loader:
                self.sampler.hand_out()
                yield batch
            more = self.sampler.end_queue()
