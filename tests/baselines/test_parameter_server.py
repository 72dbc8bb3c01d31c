"""The parameter server alone: values, clocks, barriers, failures and shutdown."""

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import offbeat
from offbeat.transport.team import Team
from offbeat.transport.torch_backend.torch_distributed import TorchCommunicator
from offbeat_lab.baselines.parameter_server import ParameterServer
from transport.communicators import (
    Function,
    World,
    every_world,
    gloo,
    meet,
    worlds_of_several,
)
from workers import run


def on_team(work: Callable[[Team], Any]) -> Function:
    return lambda communicator: work(Team(communicator))


def barrier(team: Team) -> None:
    with team.account.paused():
        team.communicator.sum(torch.zeros(1), what="barrier of the test").wait()


def request(server: ParameterServer, kind: Any, values: Any = None, **clocks: int) -> int:
    """Push ``values``, wait for the answer, and return its clock."""
    if values is not None:
        server.vector.copy_(torch.as_tensor(values))
    server.start(kind, **clocks)
    clock = server.take(wait=True)
    assert clock is not None
    return clock


def initial(elements: int) -> Tensor:
    return torch.arange(elements, dtype=torch.float64) + 100


def pushed(rank: int, number: int, elements: int = 7) -> Tensor:
    """Return the values that ``rank`` pushes: small integers, whose sum is exact in any order."""
    generator = torch.Generator().manual_seed(1000 * rank + number)
    return torch.randint(1, 50, (elements,), generator=generator).double()


def total(pushes: list[Tensor], start: Tensor) -> Tensor:
    values = start.tolist()
    for push in pushes:
        for i, value in enumerate(push.tolist()):
            values[i] += value
    return torch.tensor(values, dtype=torch.float64)


# -- values ---------------------------------------------------------------------------------------


@every_world
def test_servers_hold_the_vector_in_shards(world: World) -> None:
    """In the order of ``servers``. Sizes differ by at most one, and may be 0. A pull gets all."""
    cases = [
        (elements, servers)
        for elements in (1, 2, 7, 1000)
        for servers in (None, (1,), (0, 2), (2, 0, 1))
    ]

    def work(team: Team) -> Any:
        seen = []
        for elements, servers in cases:
            ranks = servers if team.size > 1 else None
            server = ParameterServer(team, initial(elements), servers=ranks)
            shard = None if server.shard is None else server.shard.values.clone()
            server.vector.zero_()
            request(server, "pull")
            before = server.vector.clone()
            server.barrier()
            request(server, "push_pull", pushed(team.rank, 0, elements))
            server.barrier()
            request(server, "pull")
            after = server.vector.clone()
            assert torch.equal(server.read(), after)
            server.barrier()
            server.leave()
            seen.append((shard, before, after))
        return seen

    results = world(on_team(work))
    size = len(results)
    for (elements, servers), seen in zip(cases, zip(*results, strict=True), strict=True):
        serving = list(servers or range(size)) if size > 1 else [0]
        assert [shard is not None for shard, *_ in seen] == [r in serving for r in range(size)]
        parts = [seen[rank][0] for rank in serving]
        assert torch.equal(torch.cat(parts), initial(elements))
        lengths = [part.numel() for part in parts]
        assert max(lengths) - min(lengths) <= 1
        want = total([pushed(rank, 0, elements) for rank in range(size)], initial(elements))
        for _, before, after in seen:
            assert torch.equal(before, initial(elements))
            assert torch.equal(after, want)


@every_world
def test_concurrent_pushes_add_up_exactly(world: World) -> None:
    """Each worker pushes forty times and pulls in between. No push is lost or counted twice."""

    def work(team: Team) -> Any:
        server = ParameterServer(team, torch.zeros(7, dtype=torch.float64))
        rising, last = True, torch.zeros(7, dtype=torch.float64)
        for number in range(40):
            if number % 5 == team.rank:
                request(server, "push_pull", pushed(team.rank, number))
                rising = rising and bool((server.vector >= last).all())
                last = server.vector.clone()
            else:
                request(server, "push", pushed(team.rank, number))
        server.barrier()
        end = server.read()
        server.barrier()
        server.leave()
        return rising, end, 0 if server.shard is None else server.shard.pushes

    results = world(on_team(work))
    pushes = [pushed(rank, number) for rank in range(len(results)) for number in range(40)]
    want = total(pushes, torch.zeros(7))
    for rising, end, applied in results:
        assert rising
        assert torch.equal(end, want)
        assert applied == 40 * len(results)


@every_world
def test_a_request_runs_in_the_background(world: World) -> None:
    """Its answer is taken once, and telemetry counts its bytes like those of any operation."""

    def work(team: Team) -> Any:
        account = team.account
        server = ParameterServer(team, torch.zeros(6, dtype=torch.float64))
        counts, taken = [], []
        for kind in ("push", "push_pull", "pull"):
            assert server.idle
            server.vector.fill_(1.0)
            before = account.payload_bytes
            server.start(kind)
            counts.append(account.payload_bytes - before)
            assert not server.idle
            assert server.take(wait=True) is not None
            assert server.idle
            assert server.take(wait=True) is None
            taken.append(server.vector[0].item())
        server.barrier()
        end = server.read().tolist()
        server.barrier()
        server.leave()
        return counts, taken, end, server.pulled_bytes

    results = world(on_team(work))
    size = len(results)
    header, values = 3 * 8 * (size - 1), 8 * 6 * (size - 1) // size  # to each of the other ranks
    for counts, taken, end, pulled in results:
        assert counts == [header + values, header + values, header]
        assert 2 <= taken[1] <= taken[2] <= 2 * size, "its own two pushes at least"
        assert end == [2.0 * size] * 6
        assert pulled == 2 * values, "read() does not count"


# -- clocks ---------------------------------------------------------------------------------------


# -- barriers -------------------------------------------------------------------------------------


@every_world
def test_a_barrier_holds_after_any_numbers_of_requests(world: World) -> None:
    """Repeated barriers work, and all workers receive the minimum clock."""

    def work(team: Team) -> Any:
        server = ParameterServer(team, torch.zeros(team.size, dtype=torch.float64))
        clock, clocks, sums = 0, [], []
        for round_ in range(6):
            for _ in range(5 * ((team.rank + round_) % team.size)):
                clock += 1
                request(server, "push_pull", torch.ones(team.size), clock=clock)
            clocks.append((clock, server.barrier()))
            barrier(team)
            sums.append(server.read().tolist())
            server.barrier()
        server.leave()
        return clocks, sums

    results = world(on_team(work))
    size = len(results)
    for round_ in range(6):
        own = [clocks[round_][0] for clocks, _ in results]
        want = [5 * sum((rank + r) % size for r in range(round_ + 1)) for rank in range(size)]
        assert own == want
        for clocks, sums in results:
            assert clocks[round_][1] == min(own)
            assert sums[round_] == [sum(own)] * size


# -- refused messages -----------------------------------------------------------------------------


@worlds_of_several
@pytest.mark.parametrize("kind", [77, -1])
def test_a_message_that_is_not_a_request_is_refused(world: World, kind: int) -> None:
    """The server reads nothing more from the rank, and the serving rank raises an OffbeatError."""

    def work(team: Team) -> str:
        server = ParameterServer(team, torch.zeros(4), servers=(0,))
        server.barrier()
        if team.rank == 1:
            header = torch.tensor([kind, 0, 0])
            team.communicator.send(header, destination=0, tag=1, what="test").wait()
        if team.rank > 0:
            return ""
        if world is gloo:
            for thread in threading.enumerate():
                if thread.name == "server of rank 1":
                    thread.join(20)
        else:
            team.host.sleep(1.0, "the message")
        with pytest.raises(offbeat.OffbeatError) as caught:
            request(server, "pull")
        return f"{type(caught.value).__name__}: {caught.value}"

    text = world(on_team(work))[0]
    want = "OffbeatError: rank 1 sent a message that is not a request to a parameter server: "
    assert text.startswith(f"{want}[{kind}, 0, 0]")


# -- the end --------------------------------------------------------------------------------------


def wait_in_vain(rank: int, size: int, dies: bool) -> Any:
    limit = 100.0 if dies else 0.3  # a death is noticed long before the time-out
    team = Team(TorchCommunicator(None, timeout_seconds=limit, liveness_seconds=0.6))
    server = ParameterServer(team, torch.zeros(6))
    request(server, "push_pull", torch.ones(6), clock=1, min_clock=1)
    meet("all have been answered", [0, 1, 2])
    text = ""
    if rank == 1 and dies:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank != 1:  # which never reaches clock 2
        try:
            request(server, "push_pull", torch.ones(6), clock=2, min_clock=2)
        except offbeat.CommunicationError as error:
            text = f"{type(error).__name__}: {error}"
    meet("all have seen it", [0, 2] if dies else [0, 1, 2])
    team.close()
    alive = [thread.name for thread in threading.enumerate() if "server" in thread.name]
    return text, alive


def test_a_time_out_names_the_worker_that_does_not_answer() -> None:
    """The error also names the setting to change. ``close`` ends all threads."""
    results = run(wait_in_vain, False, workers=3)
    assert [alive for _, alive in results] == [[], [], []]
    for rank in (0, 2):
        text = results[rank][0]
        assert text.startswith(f"CommunicationTimeout: rank {rank}: "), text
        assert "push_pull at" in text
        assert "timeout_seconds=0.3" in text
        assert "no answer from rank 1, busy elsewhere or stuck" in text


def test_a_dead_worker_is_named_at_once() -> None:
    """The error is raised long before the time-out. ``close`` ends all threads."""
    results = run(wait_in_vain, True, workers=3, may_die=(1,))
    for rank in (0, 2):
        text, alive = results[rank]
        assert text.startswith("CommunicationError: "), text
        assert "lost the connection to rank 1, which died" in text
        assert alive == []
