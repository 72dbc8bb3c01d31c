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
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from offbeat.errors import CommunicationError, CommunicationTimeout, MismatchError, OffbeatError
from offbeat.transport.board import Board
from offbeat.transport.host import Promise
from offbeat.transport.team import Team

T = TypeVar("T")
Range = tuple[int, int]
"""Numbers of batches, from the first to the second, which is excluded."""
_CHUNKS = 16  # a chunk has 1/(16·N) of the batches that are left, for N workers


def count(ranges: Iterable[Range]) -> int:
    """Return the number of batches in ``ranges``."""
    return sum(end - start for start, end in ranges)


def cut(ranges: Iterable[Range], start: int, end: int) -> list[Range]:
    """Return the batches at the positions from ``start`` to ``end`` (excluded) of ``ranges``."""
    found, before = [], 0
    for first, last in ranges:
        low, high = max(start - before, 0), min(end - before, last - first)
        if low < high:
            found.append((first + low, first + high))
        before += last - first
    return found


def without(ranges: Iterable[Range], removed: Iterable[Range]) -> list[Range]:
    """Return the batches of ``ranges`` that are not in ``removed``, whose ranges may overlap."""
    left, ordered = [], sorted(removed)
    for start, end in ranges:
        for first, last in ordered:
            if first < end and last > start:
                if first > start:
                    left.append((start, first))
                start = max(start, last)
        if start < end:
            left.append((start, end))
    return left


def chunk_length(left: int, workers: int, least: int) -> int:
    """Return the number of batches to take when about ``left`` batches are in the queue.

    Chunks become shorter towards the end (guided self-scheduling), so that a slow worker does not
    hold a long chunk when the queue is empty. ``least`` is the length from which on a chunk lasts
    long enough to fetch the next one. No chunk is longer than an equal share of the rest.
    """
    return min(max(least, left // (_CHUNKS * workers)), math.ceil(left / workers))


@dataclass
class Queue:
    """A queue, as one worker knows it.

    Attributes:
        epoch: Number of the epoch.
        number: Number of the queue in the epoch.
        ranges: The batches of the queue.
        taken: Value of the counter when this worker has read it last.
    """

    epoch: int
    number: int
    ranges: Sequence[Range]
    taken: int = 0


class Report(NamedTuple):
    """A worker's progress in an epoch.

    Attributes:
        epoch: Number of the epoch.
        number: Number of the queue in the epoch.
        waits: True if the queue is empty, and the worker has trained on all that it has taken.
        done: The batches of the epoch that the worker has trained on.
    """

    epoch: int
    number: int
    waits: bool
    done: Sequence[Range]


class Leases:
    """One worker's access to the queues.

    The training thread calls all methods. Background threads use the store, one at a time. The
    training waits for them for ``timeout_seconds`` at most.

    Args:
        team: The workers.
        board: The store.
    """

    def __init__(self, team: Team, board: Board) -> None:
        self._team, self._board = team, board
        self._newest: Promise[object] | None = None  # of the newest background thread
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
    ) -> Promise[tuple[int, list[Range]]]:
        """Begin to take a chunk of at least ``least`` batches, after writing ``report``.

        The result is the position of the chunk in the queue, and its batches. They are empty if the
        queue is.
        """
        self._note_members()
        left = max(0, count(queue.ranges) - queue.taken)
        length = chunk_length(left, self._team.size, least)
        key, own = f"taken/{queue.epoch}/{queue.number}", self._own_key()

        def take() -> tuple[int, list[Range]]:
            if report is not None:
                self._board.put(own, json.dumps(report))
            if length:
                queue.taken = self._board.add(key, length)
            position = queue.taken - length
            return position, cut(queue.ranges, position, position + length)

        return self._start(take)

    # -- elastic training ------------------------------------------------------------------------

    def next_queue(
        self, report: Report, whole: Sequence[Range], members: Collection[int] | None
    ) -> list[Range] | None:
        """Write ``report``, and return the queue that follows. None if it is not known yet.

        Args:
            report: Report of this worker.
            whole: The batches of the epoch.
            members: Workers that must have reached the end of this queue, too, before this worker
                may propose the next one. None: it may not.
        """
        self._note_members()
        key, own = f"queue/{report.epoch}/{report.number + 1}", self._own_key()

        def agree() -> str:
            self._board.put(own, json.dumps(report))
            if (text := self._board.get(key)) or members is None:
                return text
            reports = self._reports()
            if not all(m in reports and reports[m][:3] >= report[:3] for m in members):
                return ""
            left = without(whole, _done(reports.values(), report.epoch))
            return self._board.compare_set(key, "", json.dumps(left))

        text = self._call(agree)
        return [(start, end) for start, end in json.loads(text)] if text else None

    def reported(self, epoch: int) -> list[Range]:
        """Return the batches of an epoch that are in reports, also of lost workers."""
        self._note_members()
        return self._call(lambda: _done(self._reports().values(), epoch))

    def _reports(self) -> dict[int, Report]:
        texts = {worker: self._board.get(f"worker/{worker}") for worker in range(self._workers)}
        return {worker: Report(*json.loads(text)) for worker, text in texts.items() if text}

    def _note_members(self) -> None:
        self._workers = max(self._workers, *(member + 1 for member in self._team.members))

    def _own_key(self) -> str:
        return f"worker/{self._team.identity}"

    # -- background threads ----------------------------------------------------------------------

    def _start(self, function: Callable[[], T]) -> Promise[T]:
        """Run ``function`` in a background thread, after the one before has ended."""
        if self._newest is not None:
            self._wait(self._newest)
        future: Promise[T | Exception] = self._team.host.promise()

        def run() -> None:
            try:
                future.fulfil(function())
            except Exception as error:
                future.fulfil(error)

        self._newest = future  # type: ignore[assignment]
        self._team.host.spawn(run, what="leases of data")
        return future  # type: ignore[return-value]

    def result(self, future: Promise[T]) -> T:
        """Return the result of ``fetch``. Blocks.

        Raises:
            CommunicationError: The store does not answer.
        """
        self._wait(future)
        result = future.result
        if isinstance(result, Exception):
            if isinstance(result, OffbeatError):
                raise result
            reason = (str(result).splitlines() or [type(result).__name__])[0][:200]
            raise CommunicationError(
                f"rank {self._team.rank}: leasing data failed: the store of the workers does not "
                f"answer ({reason})"
            )
        return result

    def _wait(self, future: Promise[T]) -> None:
        if future.fulfilled:
            return
        team, start = self._team, self._team.host.now()
        seconds = team.communicator.timeout_seconds
        answered = team.host.wait_for(future, seconds, "a lease of data")
        team.account.waited(team.host.now() - start)
        if not answered:
            raise CommunicationTimeout(
                f"rank {team.rank}: leasing data failed: the store of the workers has not answered "
                f"within timeout_seconds={seconds:g}"
            )

    def _call(self, function: Callable[[], T]) -> T:
        return self.result(self._start(function))


def _done(reports: Iterable[Report], epoch: int) -> list[Range]:
    """Return the batches of an epoch that are in ``reports``."""
    done = [each for report in reports if report.epoch == epoch for each in report.done]
    return [(start, end) for start, end in done]
