"""Accounting of bytes and waiting time, by itself and in a team."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import offbeat
from offbeat.transport.communicator import Communicator
from offbeat.transport.host import Promise
from offbeat.transport.single_process import SingleCommunicator
from offbeat.transport.team import Team
from transport.communicators import World, worlds_without_processes


@worlds_without_processes
def test_payload_bytes_counts_the_inputs_of_operations(world: World) -> None:
    """Sums, maxima and gathers count in full, broadcasts and messages only at their source.

    What is refused does not count.
    """

    def message(communicator: Communicator) -> None:
        if communicator.size == 1:
            with pytest.raises(ValueError, match="a single worker has no rank 1"):
                communicator.send(torch.zeros(9), destination=1, what="test")
            with pytest.raises(ValueError, match="a single worker has no rank 1"):
                communicator.receive(torch.zeros(9), source=1, what="test")
        elif communicator.rank == 0:
            communicator.send(torch.zeros(9), destination=1, what="test").wait()
        elif communicator.rank == 1:
            communicator.receive(torch.zeros(9), source=0, what="test").wait()

    def work(communicator: Communicator) -> Any:
        counts = []
        operations: list[Callable[[], object]] = [
            lambda: communicator.sum(torch.zeros(7), what="test").wait(),
            lambda: communicator.maximum(torch.zeros(7, dtype=torch.float64), what="test").wait(),
            lambda: communicator.gather(torch.zeros(5, dtype=torch.uint8), what="test").wait(),
            lambda: communicator.broadcast(torch.zeros(6), source=0, what="test").wait(),
            lambda: communicator.gather_bytes(b"x" * (communicator.rank + 1), what="test"),
            lambda: communicator.exchange(torch.zeros(2 * communicator.size), what="test").wait(),
            lambda: message(communicator),
        ]
        for operation in operations:
            before = communicator.account.payload_bytes
            operation()
            counts.append(communicator.account.payload_bytes - before)
        return counts

    results = world(work)
    size = len(results)
    for rank, counts in enumerate(results):
        sent = 36 if rank == 0 and size > 1 else 0
        # gather_bytes: an int64 length, then padded to the longest payload
        assert counts == [28, 56, 5, 24 * (rank == 0), 8 + size, 8 * size, sent]


def test_one_of_several_senders_counts_its_share() -> None:
    """An exchange counts in full: every process of a machine sends to other machines."""
    communicator = SingleCommunicator()
    communicator.senders = 4
    communicator.sum(torch.zeros(7), what="test").wait()
    assert communicator.account.payload_bytes == 28 // 4
    communicator.exchange(torch.zeros(7), what="test").wait()
    assert communicator.account.payload_bytes == 28 // 4 + 28


@worlds_without_processes
def test_a_duplicate_shares_the_account(world: World) -> None:
    """So does a duplicate of a duplicate. Nothing counts while the account is paused."""

    def work(communicator: Communicator) -> Any:
        account, duplicate = communicator.account, communicator.duplicate()
        other = duplicate.duplicate()
        alike = (duplicate.rank, duplicate.size, duplicate.host) == (
            communicator.rank,
            communicator.size,
            communicator.host,
        )
        duplicate.sum(torch.zeros(7), what="test").wait()
        other.gather(torch.zeros(3), what="test").wait()
        counted, waited = account.payload_bytes, account.wait_seconds
        with account.paused():
            duplicate.sum(torch.zeros(7), what="test").wait()
            duplicate.exchange(torch.zeros(2 * communicator.size), what="test").wait()
        paused = account.payload_bytes - counted, account.wait_seconds - waited
        return alike, counted, waited, paused

    for alike, counted, waited, paused in world(work):
        assert alike
        assert counted == 28 + 12
        assert waited > 0
        assert paused == (0, 0.0)


def test_waiting_for_a_promise_counts_in_virtual_time() -> None:
    """It takes exactly the time until the promise is fulfilled.

    Waits of background threads add nothing.
    """

    def work() -> Any:
        team = Team(dist.group.WORLD.make_communicator(20.0))
        promise: Promise[int] = team.host.promise()

        def activity() -> None:
            message, before = torch.zeros(250), (team.rank - 1) % team.size
            team.communicator.receive(message, source=before, tag=6, what="test").wait()
            promise.fulfil(1)

        team.host.spawn(activity, what="a test activity")
        after = (team.rank + 1) % team.size
        with team.account.paused():
            team.communicator.send(torch.zeros(250), destination=after, tag=6, what="test")
        team.communicator.await_promise(promise, what="a message").wait()
        return team.account.wait_seconds, team.account.payload_bytes

    network = offbeat.Network("8Mbit/s", latency="1ms")  # 1000 bytes: 1 ms + 1 ms
    result = offbeat.simulate(work, workers=2, network=network)
    for waited, payload in result.results:
        assert waited == pytest.approx(2e-3, rel=1e-9)
        assert payload == 0
    assert {span.kind for span in result.timeline} == {"wait", "transfer"}
    assert sum(span.kind == "wait" for span in result.timeline) == 2
