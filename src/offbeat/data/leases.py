"""The queue of an epoch: all workers take chunks of its batches from a store that they share.

Batches have numbers, from 0. A *queue* is a list of ranges of batches, and a *chunk* is a run of
batches that one worker takes from it. The keys of the store (a ``Board``):

    settings        what determines the batches, equal on all workers
    taken/<e>/<q>   number of batches that were taken from queue q of epoch e, from its start
    queue/<e>/<q>   in elastic training, for q ≥ 1: the ranges of the queue
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
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from offbeat.errors import CommunicationError, CommunicationTimeout, MismatchError, OffbeatError
from offbeat.transport.board import Board
from offbeat.transport.host import Promise
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


@dataclass(eq=False)
class Queue:
    """A queue, as one worker knows it.

    Attributes:
        epoch: Number of the epoch.
        number: Number of the queue in the epoch.
        batches: The batches of the queue, in order.
        taken: Value of the counter when this worker has read it last.
    """

    epoch: int
    number: int
    batches: Numbers
    taken: int = 0


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
    for them for ``timeout_seconds`` at most.

    Args:
        team: The workers.
        board: The store.
    """

    def __init__(self, team: Team, board: Board) -> None:
        self._team, self._board = team, board
        self._workers = 0  # number of workers that this one has known; identities are below it

    def require_equal(self, settings: str) -> None:
        """Raise MismatchError if another worker has other settings."""
        first = self._call(lambda: self._board.compare_set("settings", "", settings))
        if first != settings:
            raise MismatchError(
                f"the workers lease different data: this one has {settings}, another one has "
                f"{first}"
            )

    def fetch(
        self, queue: Queue, least: int, report: Report | None
    ) -> Promise[tuple[int, Numbers] | Exception]:
        """Begin to take a chunk of at least ``least`` batches, after writing ``report``.

        The result is the position of the chunk in the queue, and its batches. There are none if the
        queue is empty.
        """
        self._known_workers()
        left = max(0, len(queue.batches) - queue.taken)
        length = chunk_length(left, self._team.size, least)

        def take() -> tuple[int, Numbers]:
            if report is not None:
                self._write(report)
            if length:
                queue.taken = self._board.add(f"taken/{queue.epoch}/{queue.number}", length)
            return queue.taken - length, queue.batches[queue.taken - length : queue.taken]

        return self._start(take)

    # -- elastic training ------------------------------------------------------------------------

    def next_queue(
        self, report: Report, whole: Numbers, members: Collection[int] | None
    ) -> Numbers | None:
        """Return the queue after those that this worker has completed, or None if there is none.

        Args:
            report: Report of this worker, which is written.
            whole: The batches of the epoch.
            members: The workers that must have completed these queues, too, before this worker may
                propose the next one. None: it may not.
        """
        key = f"queue/{report.epoch}/{report.queues}"
        known = self._known_workers()

        def agree() -> str:
            self._write(report)
            if (text := self._board.get(key)) or members is None:
                return text
            reports = self._reports(known)
            if not all(m in reports and reports[m][:2] >= report[:2] for m in members):
                return ""
            left = np.setdiff1d(whole, _done(reports, report.epoch))
            return self._board.compare_set(key, "", json.dumps(to_ranges(left)))

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
        self._board.put(f"worker/{self._team.identity}", json.dumps(report))

    def _reports(self, workers: Iterable[int]) -> dict[int, Report]:
        texts = {worker: self._board.get(f"worker/{worker}") for worker in workers}
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

    def result(self, future: Promise[T | Exception]) -> T:
        """Return the result of ``fetch``. Blocks.

        Raises:
            CommunicationError: The store does not answer.
        """
        team = self._team
        failed = f"rank {team.rank}: leasing data failed: the store of the workers"
        if not future.fulfilled:
            seconds = team.communicator.timeout_seconds
            with team.communicator.waiting():
                answered = team.host.wait_for(future, seconds, "a lease of data")
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
        return self.result(self._start(function))


def _done(reports: Mapping[int, Report], epoch: int) -> Numbers:
    """Return the batches of an epoch that are in ``reports``."""
    return to_numbers(r for each in reports.values() if each.epoch == epoch for r in each.done)
