"""The queue of an epoch: ranges, lengths of chunks, counters, and the agreement on what is left."""

import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.data.leases import Leases, Ranges, chunk_length, to_numbers, to_ranges
from offbeat.errors import MismatchError
from offbeat.transport.single_process import SingleCommunicator
from offbeat.transport.team import Team
from offbeat.transport.torch_backend.torch_store import TorchStore

NUMBERS = st.lists(st.integers(0, 60), max_size=60, unique=True)


@given(NUMBERS)
def test_ranges_hold_the_same_numbers(numbers: list[int]) -> None:
    """In ascending order, in the fewest ranges: there is a gap between any two."""
    ranges = to_ranges(numbers)
    assert to_numbers(ranges).tolist() == sorted(numbers)
    assert all(end < first for (_, end), (first, _) in pairwise(ranges))
    assert json.loads(json.dumps(ranges)) == ranges


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
    """Workers that share a store in this process, each in a queue of ``total`` batches."""

    def __init__(self, number: int, total: int, epoch: int = 0, *, elastic: bool = True) -> None:
        store, self.whole = TorchStore(), np.arange(total)
        self.leases = [Leases(self.team(w, number), store, elastic=elastic) for w in range(number)]
        for leases in self.leases:
            leases.begin(epoch, 0, self.whole)

    @staticmethod
    def team(worker: int, number: int) -> Team:
        communicator = SingleCommunicator()
        communicator.rank, communicator.size = worker, number
        team = Team(communicator)
        assert (team.identity, team.members) == (worker, (*range(number),))
        return team

    def take(self, worker: int, done: Ranges | None = None) -> list[int]:
        leases = self.leases[worker]
        position, chunk = leases.take(done or [])
        assert leases._ahead is not None
        # A slow store would make the chunks longer.
        assert leases._ahead.wait(20, "a chunk")
        assert chunk.tolist() == leases.batches[position : position + len(chunk)].tolist()
        return [int(number) for number in chunk]

    def left(
        self, worker: int, done: Ranges, members: list[int] | tuple[()] | None
    ) -> list[int] | None:
        found = self.leases[worker].agree_on_left(done, self.whole, members)
        return None if found is None else found.tolist()


@given(
    st.integers(0, 300),
    st.lists(st.floats(0.1, 10), min_size=1, max_size=6),
)
def test_every_batch_is_taken_once_whatever_the_speeds(total: int, speeds: list[float]) -> None:
    """Each worker knows only its own chunks and the counter. Faster workers take more."""
    workers, taken, ends = (
        Workers(len(speeds), total, elastic=False),
        list[int](),
        [0.0] * len(speeds),
    )
    over = set[int]()
    while len(over) < len(speeds):
        worker = min({*range(len(speeds))} - over, key=ends.__getitem__)
        chunk = workers.take(worker)
        taken += chunk
        ends[worker] += len(chunk) / speeds[worker]
        if not chunk:
            over.add(worker)
    assert sorted(taken) == [*range(total)]
    # No chunk is longer than 1/(16 · N) of all batches. The next one is taken ahead.
    longest = max(1, total / (16 * len(speeds))) / min(speeds)
    assert max(ends) - min(ends) <= 2 * longest + 1e-6


def test_workers_with_other_settings_are_found() -> None:
    workers = Workers(2, 20)
    workers.leases[0].require_equal("batch_size=2")
    with pytest.raises(MismatchError, match="batch_size=3, another one has batch_size=2"):
        workers.leases[1].require_equal("batch_size=3")


# -- the end of an epoch -----------------------------------------------------------------------


def test_what_is_in_no_report_is_left() -> None:
    """Worker 2 is lost: it has reported four batches, and taken more."""
    workers = Workers(3, 20)
    workers.take(2, [[0, 4]])
    first, second = [[4, 10]], [[12, 20]]
    assert workers.left(0, first, None) is None
    # Worker 1 still trains.
    assert workers.left(0, first, [0, 1]) is None
    assert workers.left(1, second, None) is None
    assert workers.left(0, first, [0, 1]) == [10, 11]
    # Worker 1 is late: it accepts the queue, although worker 0 has trained on it.
    workers.leases[0].begin(0, 1, np.array([10, 11]))
    third = [[4, 12]]
    assert workers.left(0, third, None) is None
    assert workers.left(1, second, None) == [10, 11]
    workers.leases[1].begin(0, 1, np.array([10, 11]))
    assert workers.left(1, second, [0, 1]) == []
    assert workers.left(0, third, None) == []


def test_a_worker_that_has_written_no_report_is_waited_for() -> None:
    """It has just joined. Without waiting, all that is in no report is left."""
    workers = Workers(2, 20, epoch=3)
    assert workers.left(0, [[5, 20]], [0, 1]) is None
    assert workers.left(0, [[5, 20]], ()) == [0, 1, 2, 3, 4]


def test_reports_of_another_epoch_do_not_count() -> None:
    workers = Workers(2, 20, epoch=3)
    workers.leases[1].begin(4, 0, workers.whole)
    workers.take(1, [[0, 9]])
    assert workers.left(0, [[5, 20]], [0, 1]) == [0, 1, 2, 3, 4]
    assert workers.leases[0].reported(4).tolist() == [*range(9)]
    assert workers.leases[0].reported(3).tolist() == [*range(5, 20)]
