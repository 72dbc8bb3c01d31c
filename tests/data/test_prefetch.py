"""Prefetch: failures of the store, and the end of training."""

import threading

import pytest
from typing_extensions import override

from offbeat.data.leasing.leases import Leases
from offbeat.data.leasing.plan import Plan, Settings
from offbeat.data.leasing.prefetch import Prefetch
from offbeat.errors import CommunicationError, CommunicationTimeout, OffbeatError
from offbeat.transport.board import Board, LocalBoard
from offbeat.transport.single_process import SingleCommunicator
from offbeat.transport.team import Team


def prefetch_from(board: Board, timeout_seconds: float = 10.0) -> Prefetch:
    settings = Settings(20, 2, False, 0, False)
    leases = Leases(board, 0, lambda epoch: Plan(settings, epoch, 1, ((0, 20),)))
    return Prefetch(leases, Team(SingleCommunicator(timeout_seconds)), lambda: ())


class Failing(LocalBoard):
    """A store whose server ends after some additions."""

    additions = 3

    @override
    def add(self, key: str, amount: int) -> int:
        if not self.additions:
            raise RuntimeError("Connection reset by peer\nException raised from …")
        self.additions -= 1
        return super().add(key, amount)


class Silent(LocalBoard):
    """A store that does not answer."""

    def __init__(self) -> None:
        super().__init__()
        self.release = threading.Event()

    @override
    def add(self, key: str, amount: int) -> int:
        self.release.wait(20)
        return super().add(key, amount)


def test_chunks_come_in_order_and_end() -> None:
    """Ten chunks of one batch, and then None, also in the next epoch."""
    prefetch = prefetch_from(LocalBoard())
    for epoch in range(2):
        prefetch.begin(epoch)
        chunks = []
        while (lease := prefetch.take()) is not None:
            assert (lease.epoch, lease.batches) == (epoch, 1)
            chunks.append(lease.chunk)
            prefetch.drawn()
            prefetch.finish(lease)
        assert chunks == list(range(10))
    prefetch.settle()


def test_a_lost_store_raises_an_error_that_names_it() -> None:
    """On the training thread, once the chunks in hand are used; again in each later call."""
    prefetch = prefetch_from(Failing())
    prefetch.begin(0)
    text = r"^rank 0: leasing data failed: the store .* \(Connection reset by peer\)$"

    def use_four() -> None:
        for _ in range(4):
            assert prefetch.take() is not None
            prefetch.drawn()

    with pytest.raises(CommunicationError, match=text):
        use_four()
    with pytest.raises(CommunicationError, match=text):
        prefetch.settle()


def test_a_silent_store_raises_a_timeout() -> None:
    board = Silent()
    prefetch = prefetch_from(board, timeout_seconds=0.2)
    prefetch.begin(0)
    text = "rank 0: leasing data failed: .* has not answered within timeout_seconds=0.2"
    with pytest.raises(CommunicationTimeout, match=text):
        prefetch.take()
    board.release.set()
    prefetch.stop()


def test_a_call_has_the_time_limit_and_the_errors_of_leases() -> None:
    board = Silent()
    prefetch = prefetch_from(board, timeout_seconds=0.2)
    with pytest.raises(CommunicationTimeout, match=r"has not answered within timeout_seconds=0\.2"):
        prefetch.call(lambda: board.add("key", 1))
    board.release.set()
    assert prefetch.call(lambda: board.add("key", 1)) == 2  # after the first call has ended
    failing = Failing()
    failing.additions = 0
    with pytest.raises(CommunicationError, match=r"leasing data failed: .* \(Connection reset"):
        prefetch.call(lambda: failing.add("key", 1))


def test_nothing_is_leased_after_the_end() -> None:
    prefetch = prefetch_from(LocalBoard())
    prefetch.begin(0)
    assert prefetch.take() is not None
    prefetch.stop()
    with pytest.raises(OffbeatError, match="the training has ended"):
        prefetch.take()
