"""The queue of an epoch: ranges, lengths of chunks, counters, and the agreement on what is left."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.data.leases import Leases, Queue, Range, Report, chunk_length, count, cut, without
from offbeat.errors import MismatchError
from offbeat.transport.board import LocalBoard
from offbeat.transport.single_process import SingleCommunicator
from offbeat.transport.team import Team

RANGES = st.lists(st.integers(0, 60), max_size=8, unique=True).map(
    lambda ends: [*zip(*[iter(sorted(ends))] * 2, strict=False)]
)


def batches(ranges: Any) -> list[int]:
    return [number for start, end in ranges for number in range(start, end)]


@given(RANGES, st.integers(0, 70), st.integers(0, 70))
def test_a_cut_has_the_batches_at_some_positions(ranges: Any, start: int, length: int) -> None:
    every = batches(ranges)
    assert count(ranges) == len(every)
    assert batches(cut(ranges, start, start + length)) == every[start : start + length]


@given(RANGES, RANGES, RANGES)
def test_what_is_left_was_not_removed(ranges: Any, one: Any, other: Any) -> None:
    removed = {*batches(one), *batches(other)}
    expected = [number for number in batches(ranges) if number not in removed]
    assert batches(without(ranges, [*other, *one])) == expected


# -- chunks ------------------------------------------------------------------------------------


def test_chunks_shrink_to_one_batch() -> None:
    """Written out: 1/(16 · 2) of what is left, at least one batch or as many as are asked for."""
    left, lengths = 100, []
    while left:
        lengths.append(chunk_length(left, 2, 1))
        left -= lengths[-1]
    assert lengths[:5] == [3, 3, 2, 2, 2]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[-60:] == [1] * 60
    assert chunk_length(100, 2, 8) == 8
    assert chunk_length(10, 4, 8) == 3  # an equal share
    assert chunk_length(0, 2, 1) == 0


class Workers:
    """Workers that share a store in this process. ``taken``: the batches of each of them."""

    def __init__(self, number: int) -> None:
        self.board = LocalBoard()
        self.leases = [Leases(self.team(worker, number), self.board) for worker in range(number)]

    @staticmethod
    def team(worker: int, number: int) -> Team:
        class Ranked(SingleCommunicator):
            rank, size = worker, number

        team = Team(Ranked())
        assert (team.identity, team.members) == (worker, (*range(number),))
        return team

    def fetch(self, worker: int, queue: Queue, report: Report | None = None) -> list[Range]:
        leases = self.leases[worker]
        position, chunk = leases.result(leases.fetch(queue, 1, report))
        assert chunk == cut(queue.ranges, position, position + count(chunk))
        return chunk


@given(
    st.integers(0, 300),
    st.lists(st.floats(0.1, 10), min_size=1, max_size=6),
)
def test_every_batch_is_taken_once_whatever_the_speeds(total: int, speeds: list[float]) -> None:
    """Each worker knows only its own queue and the counter. Faster workers take more."""
    workers, taken, ends = Workers(len(speeds)), list[int](), [0.0] * len(speeds)
    queues = [Queue(0, 0, [(0, total)]) for _ in speeds]
    over = set[int]()
    while len(over) < len(speeds):
        worker = min({*range(len(speeds))} - over, key=ends.__getitem__)
        chunk = workers.fetch(worker, queues[worker])
        taken += batches(chunk)
        ends[worker] += count(chunk) / speeds[worker]
        if not chunk:
            over.add(worker)
    assert taken == [*range(total)]
    # No chunk is longer than 1/(16 · N) of all batches.
    longest = max(1, total / (16 * len(speeds))) / min(speeds)
    assert max(ends) - min(ends) <= longest + 1e-6


def test_workers_with_other_settings_are_found() -> None:
    workers = Workers(2)
    workers.leases[0].require_equal("batch_size=2")
    with pytest.raises(MismatchError, match="batch_size=3, another one has batch_size=2"):
        workers.leases[1].require_equal("batch_size=3")


# -- the end of an epoch -----------------------------------------------------------------------

WHOLE = [(0, 20)]


def test_the_next_queue_has_what_is_in_no_report() -> None:
    """Worker 2 is lost: it has reported four batches, and taken two more."""
    workers = Workers(3)
    workers.fetch(2, Queue(0, 0, WHOLE, taken=20), Report(0, 0, False, [(0, 4)]))
    first, second = Report(0, 0, True, [(4, 10)]), Report(0, 0, True, [(12, 20)])
    assert workers.leases[0].next_queue(first, WHOLE, None) is None
    # Worker 1 still trains.
    assert workers.leases[0].next_queue(first, WHOLE, [0, 1]) is None
    assert workers.leases[1].next_queue(second, WHOLE, None) is None
    assert workers.leases[0].next_queue(first, WHOLE, [0, 1]) == [(10, 12)]
    # Worker 1 is late: it accepts the queue, although worker 0 has trained on it.
    third = Report(0, 1, True, [(4, 12)])
    assert workers.leases[0].next_queue(third, WHOLE, None) is None
    assert workers.leases[1].next_queue(second, WHOLE, None) == [(10, 12)]
    assert workers.leases[1].next_queue(second._replace(number=1), WHOLE, [0, 1]) == []
    assert workers.leases[0].next_queue(third, WHOLE, None) == []


def test_a_worker_that_has_written_no_report_is_waited_for() -> None:
    """It has just joined. Without waiting, all that is in no report is left."""
    workers = Workers(2)
    report = Report(3, 0, True, [(5, 20)])
    assert workers.leases[0].next_queue(report, WHOLE, [0, 1]) is None
    assert workers.leases[0].next_queue(report, WHOLE, ()) == [(0, 5)]


def test_reports_of_another_epoch_do_not_count() -> None:
    workers = Workers(2)
    later = Report(4, 0, False, [(0, 9)])
    workers.fetch(1, Queue(4, 0, WHOLE), later)
    assert workers.leases[0].next_queue(Report(3, 0, True, [(5, 20)]), WHOLE, [0, 1]) == [(0, 5)]
    assert workers.leases[0].reported(4) == [(0, 9)]
    assert workers.leases[0].reported(3) == [(5, 20)]
