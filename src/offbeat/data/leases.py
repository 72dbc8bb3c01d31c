"""The queue of an epoch: all workers take chunks of its batches from a store that they share.

Batches have numbers, from 0. A *queue* is a list of batches, and a *chunk* is a run of batches that
one worker takes from it. The keys of the store (a ``KeyValueStore``):

    settings        what determines the batches, equal on all workers
    taken/<e>/<q>   number of batches that were taken from queue q of epoch e, from its start
    queue/<e>/<q>   in elastic training, for q ≥ 1: the batches of the queue, as ranges
    worker/<w>      in elastic training: the ``Report`` of worker w

Queue 0 has the batches of the epoch. A worker takes a chunk by adding its length to ``taken``. The
counter never decreases, so every batch is taken exactly once.

In elastic training, a lost worker may not have trained on batches that it has taken. So an epoch
ends only when every batch is in the report of some worker. A worker that finds the queue empty
reports what it has trained on, and waits until all members have done the same. The batches that are
in no report were taken by lost workers, and become the next queue of the epoch. If there are none,
the next queue is empty, and the epoch ends. The first proposal for the next queue is accepted, so
all workers agree. A report that is written too late, or not at all, only causes batches to be
trained on again.
"""

import json
import math
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from offbeat.errors import CommunicationError, CommunicationTimeout, MismatchError, OffbeatError
from offbeat.transport.host import Promise
from offbeat.transport.key_value_store import KeyValueStore
from offbeat.transport.team import Team

T = TypeVar("T")
Numbers: TypeAlias = npt.NDArray[np.int64]
"""Numbers of batches."""
Ranges: TypeAlias = list[list[int]]
"""Numbers of batches as pairs [first, end), for messages."""
_CHUNKS = 16  # a chunk has 1/(16·N) of the batches that are left, for N workers


def to_numbers(ranges: Iterable[Iterable[int]]) -> Numbers:
    """Return the numbers in ``ranges``."""
    return np.concatenate([np.empty(0, np.int64), *(np.arange(*each) for each in ranges)])


def to_ranges(numbers: npt.ArrayLike) -> Ranges:
    """Return distinct numbers as ranges in ascending order."""
    ordered = np.sort(np.asarray(numbers, np.int64))
    runs = np.split(ordered, np.flatnonzero(np.diff(ordered) != 1) + 1)
    return [[int(run[0]), int(run[-1]) + 1] for run in runs if run.size]


def chunk_length(left: int, workers: int, least: int) -> int:
    """Return the number of batches to take when about ``left`` batches are in the queue.

    Chunks become shorter towards the end (guided self-scheduling), so that a slow worker does not
    hold a long chunk when the queue is empty. ``least`` is the length from which on a chunk lasts
    long enough to fetch the next one. No chunk is longer than an equal share of the rest.
    """
    return min(max(least, left // (_CHUNKS * workers)), math.ceil(left / workers))


class Report(NamedTuple):
    """A worker's progress in an epoch.

    Attributes:
        epoch: Number of the epoch.
        queues: Number of queues of the epoch that the worker has completed: it found them empty,
            and has trained on all that it has taken.
        done: The batches of the epoch that the worker has trained on.
    """

    epoch: int
    queues: int
    done: Ranges


class Leases:
    """One worker's access to the queues.

    The training thread calls all methods. Background threads use the store, and the training waits
    for them for ``timeout_seconds`` at most. All methods but ``begin`` wait.

    Args:
        team: The workers.
        store: The store.
        elastic: True to write reports.

    Attributes:
        epoch: Number of the epoch of the current queue. -1 before the first one.
        number: Number of the current queue in the epoch.
        batches: The batches of the current queue, in order.
    """

    def __init__(self, team: Team, store: KeyValueStore, *, elastic: bool) -> None:
        self._team, self._store, self._elastic = team, store, elastic
        self.epoch, self.number, self.batches = -1, 0, to_numbers([])
        self._workers = 0  # number of workers that this one has known; identities are below it
        self._counter = 0  # end of the last chunk of this worker in the queue
        self._least = 1  # least length of a chunk
        self._ahead: Promise[tuple[int, Numbers] | Exception] | None = None  # the next chunk

    def require_equal(self, settings: str) -> None:
        """Raise MismatchError if another worker has other settings."""
        first = self._call(lambda: self._store.compare_set("settings", "", settings))
        if first != settings:
            raise MismatchError(
                f"the workers lease different data: this one has {settings}, another one has "
                f"{first}"
            )

    def begin(self, epoch: int, number: int, batches: Numbers) -> None:
        """Continue with another queue."""
        self.epoch, self.number, self.batches = epoch, number, batches
        self._counter, self._ahead = 0, None

    def take(self, done: Ranges) -> tuple[int, Numbers]:
        """Return the position of the next chunk in the queue, and its batches: none at the end.

        The chunk after it is fetched meanwhile. ``done`` has the batches of the epoch that this
        worker has trained on.
        """
        if self._ahead is None:
            self._ahead = self._fetch(done)
        else:  # a chunk should last until the next one is there
            self._least = max(1, self._least - 1 if self._ahead.fulfilled else 2 * self._least)
        position, chunk = self._result(self._ahead)
        self._counter = position + len(chunk)
        if chunk.size:
            self._ahead = self._fetch(done)
        return position, chunk

    def _fetch(self, done: Ranges) -> Promise[tuple[int, Numbers] | Exception]:
        self._known_workers()
        batches, end = self.batches, self._counter
        key, report = f"taken/{self.epoch}/{self.number}", Report(self.epoch, self.number, done)
        length = chunk_length(max(0, len(batches) - end), self._team.size, self._least)

        def take() -> tuple[int, Numbers]:
            if self._elastic:
                self._write(report)
            taken = self._store.add(key, length) if length else end
            return taken - length, batches[taken - length : taken]

        return self._start(take)

    # -- elastic training ------------------------------------------------------------------------

    def agree_on_left(
        self, done: Ranges, whole: Numbers, members: Collection[int] | None
    ) -> Numbers | None:
        """Return what lost workers have left of the epoch, at the end of the current queue.

        All workers return the same. None: it is not decided yet.

        Args:
            done: The batches of the epoch that this worker has trained on.
            whole: The batches of the epoch.
            members: The workers that must have reached the end of the queue, too, before this one
                may decide. None: it may not.
        """
        report = Report(self.epoch, self.number + 1, done)
        key, known = f"queue/{report.epoch}/{report.queues}", self._known_workers()

        def agree() -> str:
            self._write(report)
            if (text := self._store.get(key)) or members is None:
                return text
            reports = self._reports(known)
            if not all(m in reports and reports[m][:2] >= report[:2] for m in members):
                return ""
            left = np.setdiff1d(whole, _done(reports, report.epoch))
            return self._store.compare_set(key, "", json.dumps(to_ranges(left)))

        text = self._call(agree)
        return to_numbers(json.loads(text)) if text else None

    def reported(self, epoch: int) -> Numbers:
        """Return the batches of an epoch that are in reports, also of lost workers."""
        known = self._known_workers()
        return self._call(lambda: _done(self._reports(known), epoch))

    def _known_workers(self) -> range:
        """Return the identities of all workers that may have written a report."""
        self._workers = max(self._workers, *(member + 1 for member in self._team.members))
        return range(self._workers)

    def _write(self, report: Report) -> None:
        self._store.put(f"worker/{self._team.identity}", json.dumps(report))

    def _reports(self, workers: Iterable[int]) -> dict[int, Report]:
        texts = {worker: self._store.get(f"worker/{worker}") for worker in workers}
        return {worker: Report(*json.loads(text)) for worker, text in texts.items() if text}

    # -- background threads ----------------------------------------------------------------------

    def _start(self, function: Callable[[], T]) -> Promise[T | Exception]:
        """Run ``function`` in a background thread."""
        future: Promise[T | Exception] = self._team.host.promise()

        def run() -> None:
            try:
                future.fulfil(function())
            except Exception as error:  # any exception, because the training waits for it
                future.fulfil(error)

        self._team.host.spawn(run, what="leases of data")
        return future

    def _result(self, future: Promise[T | Exception]) -> T:
        """Wait for a background thread. Raise CommunicationError if the store does not answer."""
        team = self._team
        failed = f"rank {team.rank}: leasing data failed: the store of the workers"
        if not future.fulfilled:
            seconds = team.communicator.timeout_seconds
            with team.communicator.waiting():
                answered = future.wait(seconds, "a lease of data")
            if not answered:
                raise CommunicationTimeout(
                    f"{failed} has not answered within timeout_seconds={seconds:g}"
                )
        result = future.result
        if isinstance(result, Exception) and not isinstance(result, OffbeatError):
            reason = (str(result).splitlines() or [type(result).__name__])[0][:200]
            raise CommunicationError(f"{failed} does not answer ({reason})")
        if isinstance(result, Exception):
            raise result
        return result

    def _call(self, function: Callable[[], T]) -> T:
        return self._result(self._start(function))


def _done(reports: dict[int, Report], epoch: int) -> Numbers:
    """Return the batches of an epoch that are in ``reports``."""
    return to_numbers(r for each in reports.values() if each.epoch == epoch for r in each.done)
