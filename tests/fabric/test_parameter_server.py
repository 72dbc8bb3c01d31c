"""The parameter server by itself: values, clocks, meetings, what it refuses, and how it ends."""

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import offbeat
from fabric.communicators import (
    STEP_SECONDS,
    Function,
    World,
    every_world,
    gloo,
    meet,
    worlds_of_several,
)
from offbeat.fabric import Team, TorchCommunicator
from offbeat.fabric.parameter_server import ParameterServer
from offbeat.fabric.shard import NEVER, Request, Rule
from workers import run


def on_team(work: Callable[[Team], Any]) -> Function:
    return lambda fabric: work(Team(fabric))


def barrier(team: Team) -> None:
    team.uncounted.sum(torch.zeros(1), what="everyone has been told").wait()


def initial(elements: int) -> Tensor:
    return torch.arange(elements, dtype=torch.float64) + 100


def pushed(rank: int, number: int, elements: int = 7) -> Tensor:
    """What ``rank`` pushes: small integers, so that any order gives the same sum."""
    generator = torch.Generator().manual_seed(1000 * rank + number)
    return torch.randint(1, 50, (elements,), generator=generator).double()


def total(pushes: list[Tensor], start: Tensor) -> Tensor:
    values = start.tolist()
    for push in pushes:
        for i, value in enumerate(push.tolist()):
            values[i] += value
    return torch.tensor(values, dtype=torch.float64)


# -- values ---------------------------------------------------------------------------------------


@pytest.mark.sampled
@every_world
@pytest.mark.parametrize("servers", [None, (1,), (0, 2), (2, 0, 1)], ids=str)
def test_the_vector_lies_in_shards_on_the_servers(
    world: World, servers: tuple[int, ...] | None
) -> None:
    """In their order, of sizes that differ by one at most, empty ones too; a pull is the whole."""
    lengths = [1, 2, 7, 1000]

    def work(team: Team) -> Any:
        places = None if servers is None or team.size == 1 else servers
        seen = []
        for elements in lengths:
            server = ParameterServer(team, initial(elements), servers=places)
            shard = None if server.shard is None else server.shard.values.clone()
            server.stage().zero_()
            server.pull().wait()
            before = server.values.clone()
            server.arrive()
            server.stage().copy_(pushed(team.rank, 0, elements))
            server.push_pull().wait()
            server.arrive()
            server.pull().wait()
            after = server.values.clone()
            server.arrive()
            server.leave()
            seen.append((shard, before, after))
        return seen

    results = world(on_team(work))
    serving = [rank for rank in servers or range(3) if len(results) > 1] or [0]
    for elements, seen in zip(lengths, zip(*results, strict=True), strict=True):
        assert [shard is not None for shard, *_ in seen] == [
            rank in serving for rank in range(len(results))
        ]
        parts = [seen[rank][0] for rank in serving]
        assert torch.equal(torch.cat(parts), initial(elements))
        sizes = [part.numel() for part in parts]
        assert max(sizes) - min(sizes) <= 1
        want = total([pushed(rank, 0, elements) for rank in range(len(results))], initial(elements))
        for _, before, after in seen:
            assert torch.equal(before, initial(elements))
            assert torch.equal(after, want)


@every_world
def test_a_worker_finds_its_own_pushes_in_what_it_pulls(world: World) -> None:
    """Requests of one worker are served in their order, whether or not it waits for them."""

    def work(team: Team) -> Any:
        server = ParameterServer(team, torch.zeros(4 * team.size, dtype=torch.float64))
        seen = []
        for step in range(1, 9):  # each worker adds to coordinates of its own
            server.stage().zero_()
            server.values[team.rank :: team.size] = step
            if step % 3:
                server.push()
                server.pull().wait()
            else:
                server.push_pull().wait()
            seen.append(server.values[team.rank :: team.size].tolist())
        server.arrive()
        server.leave()
        return seen

    for seen in world(on_team(work)):
        assert seen == [[step * (step + 1) / 2] * 4 for step in range(1, 9)]


@every_world
def test_concurrent_pushes_add_up_exactly(world: World) -> None:
    """Forty pushes of every worker, with pulls in between, lose nothing and never go back."""

    def work(team: Team) -> Any:
        server = ParameterServer(team, torch.zeros(7, dtype=torch.float64))
        rising, last = True, torch.zeros(7, dtype=torch.float64)
        for number in range(40):
            server.stage().copy_(pushed(team.rank, number))
            if number % 5 == team.rank:
                server.push_pull().wait()
                rising = rising and bool((server.values >= last).all())
                last = server.values.clone()
            else:
                server.push()
        server.arrive()
        server.pull().wait()
        end = server.values.clone()
        server.arrive()
        server.leave()
        return rising, end, 0 if server.shard is None else server.shard.version

    results = world(on_team(work))
    pushes = [pushed(rank, number) for rank in range(len(results)) for number in range(40)]
    want = total(pushes, torch.zeros(7))
    for rising, end, version in results:
        assert rising
        assert torch.equal(end, want)
        assert version == 40 * len(results)


@worlds_of_several
def test_the_rule_decides_what_a_push_does(world: World) -> None:
    """It gets the shard, the values and who pushes, and chooses the answer."""

    class Scaled(Rule):
        def push(self, shard: Tensor, values: Tensor, *, source: int) -> None:
            self.before = shard.clone()
            shard.add_(values, alpha=0.1 * (source + 1))

        def answer(self, shard: Tensor, *, source: int) -> Tensor:
            return -self.before

    def work(team: Team) -> Any:
        server = ParameterServer(team, initial(5), rule=Scaled)
        answers = []
        for turn in range(team.size):  # one after the other
            if turn == team.rank:
                server.stage().fill_(1.0)
                server.push_pull().wait()
                answers.append(server.values.clone())
            server.arrive()
        server.pull().wait()
        end = server.values.clone()
        server.arrive()
        server.leave()
        return answers[0], end

    before, results = initial(5), world(on_team(work))
    for rank, (answer, _) in enumerate(results):
        assert torch.equal(answer, -before)
        before = before + 0.1 * (rank + 1)
    for _, end in results:
        torch.testing.assert_close(end, before, rtol=0, atol=1e-15)


@every_world
def test_a_request_beside_the_training(world: World) -> None:
    """It ends by itself, its answer is taken once, and its bytes count like any other's."""

    def work(team: Team) -> Any:
        account = team.account
        server = ParameterServer(team, torch.zeros(6, dtype=torch.float64))
        counts, taken = [], []
        for kind in ("push", "push_pull", "pull"):
            assert server.free
            server.values.fill_(1.0)
            before = account.payload_bytes
            server.begin(kind)
            counts.append(account.payload_bytes - before)
            answer = server.take(wait=True)
            assert answer is not None
            assert server.free
            assert server.take(wait=True) is None
            taken.append(server.values[0].item())
        server.arrive()
        end = server.look().tolist()
        server.arrive()
        server.leave()
        return counts, taken, end, server.pulled_bytes

    results = world(on_team(work))
    size = len(results)
    header, values = 7 * 8 * (size - 1), 8 * 6 * (size - 1) // size
    for counts, taken, end, pulled in results:
        assert counts == [header + values, header + values, header]
        assert 2 <= taken[1] <= taken[2] <= 2 * size, "its own two pushes at least"
        assert end == [2.0 * size] * 6
        assert pulled == 2 * values, "a look does not count"


@worlds_of_several
def test_a_meeting_answers_what_was_begun(world: World) -> None:
    """Rank 0 waits for a clock that the others never reach; it is told the slowest there is."""

    def work(team: Team) -> Any:
        server = ParameterServer(team, torch.zeros(3, dtype=torch.float64))
        server.values.fill_(1.0)
        clock = 9 if team.rank == 0 else 2 + team.rank
        server.begin("push_pull", clock=clock, least=9 if team.rank == 0 else 0)
        if team.rank > 0:
            server.settle()
        barrier(team)
        met = server.arrive()
        answer = server.take()
        barrier(team)
        server.settle(now=True)  # nothing is under way: nothing happens
        server.begin("pull", least=100)
        server.settle(now=True)
        again = server.take()
        server.arrive()
        server.leave()
        return met, None if answer is None else answer.clock, again is not None

    for rank, (met, clock, again) in enumerate(world(on_team(work))):
        assert met == 3
        assert again
        assert clock == 3 if rank == 0 else clock is not None and clock <= 3


@worlds_of_several
def test_bytes_are_counted_where_they_are_sent(world: World) -> None:
    """A push counts header and values for other ranks; a pull its header, and what it brings."""

    def work(team: Team) -> Any:
        account = team.account
        server = ParameterServer(team, torch.zeros(9, dtype=torch.float64))
        counts, pulled = [], []
        for request in (server.push, server.pull, server.push_pull):
            before = account.payload_bytes
            handle = request()
            if handle is not None:
                handle.wait()
            server.stage()
            counts.append(account.payload_bytes - before)
            pulled.append(server.pulled_bytes)
        server.arrive()
        server.leave()
        return counts, pulled

    header, others = 7 * 8, 2  # seven int64 to each of two other ranks, 3 float64 each
    values = 2 * 3 * 8
    for counts, pulled in world(on_team(work)):
        assert counts == [header * others + values, header * others, header * others + values]
        assert pulled == [0, values, 2 * values]


# -- clocks ---------------------------------------------------------------------------------------


@worlds_of_several
def test_a_pull_waits_for_the_slowest(world: World) -> None:
    """With ``least`` it brings every push of clocks up to there, from all workers."""

    def work(team: Team) -> Any:
        server = ParameterServer(team, torch.zeros(team.size, dtype=torch.float64))
        server.arrive()
        start = team.host.now()
        for clock in range(1, 4):
            if team.rank == 0:
                team.host.computed(1)  # only rank 0 takes time
            server.stage().zero_()
            server.values[team.rank] = 1.0
            server.push(clock=clock)
        answer = server.pull(least=3).wait()
        seconds, values = team.host.now() - start, server.values.tolist()
        server.arrive()
        server.leave()
        return answer.clock, values, seconds

    for clock, values, seconds in world(on_team(work)):
        assert clock == 3
        assert values == [3.0, 3.0, 3.0]
        assert world is gloo or 3 * STEP_SECONDS <= seconds <= 3 * STEP_SECONDS + 0.01


@worlds_of_several
def test_clocks_have_64_bits(world: World) -> None:
    """Beyond 2³² and up to half the marker for never."""
    clocks = [2**31 + 1, 2**40, NEVER // 2]

    def work(team: Team) -> Any:
        server = ParameterServer(team, torch.zeros(4))
        seen = []
        for clock in clocks:
            server.stage().fill_(1.0)
            answer = server.push_pull(clock=clock + team.rank, least=clock).wait()
            seen.append(answer.clock)
        met = server.arrive()
        server.leave()
        return seen, met

    for seen, met in world(on_team(work)):
        assert all(clock <= got <= clock + 2 for clock, got in zip(clocks, seen, strict=True))
        assert met == clocks[-1]


# -- meetings -------------------------------------------------------------------------------------


@every_world
def test_workers_meet_whatever_each_has_asked_before(world: World) -> None:
    """Again and again, after unequal numbers of requests; all get the slowest worker's clock."""

    def work(team: Team) -> Any:
        server = ParameterServer(team, torch.zeros(team.size, dtype=torch.float64))
        clock, met, sums = 0, [], []
        for round_ in range(6):
            for _ in range(5 * ((team.rank + round_) % team.size)):
                clock += 1
                server.stage().fill_(1.0)
                server.push_pull(clock=clock).wait()
            met.append((clock, server.arrive()))
            barrier(team)
            server.pull().wait()
            sums.append(server.values.tolist())
            server.arrive()
        server.leave()
        return met, sums

    results = world(on_team(work))
    size = len(results)
    for round_ in range(6):
        clocks = [met[round_][0] for met, _ in results]
        want = [5 * sum((rank + r) % size for r in range(round_ + 1)) for rank in range(size)]
        assert clocks == want
        for met, sums in results:
            assert met[round_][1] == min(clocks)
            assert sums[round_] == [sum(clocks)] * size


@worlds_of_several
def test_nobody_waits_for_one_that_has_arrived(world: World) -> None:
    """Its clock does not count, also for pulls that wait already; afterwards it does again."""

    def work(team: Team) -> Any:
        server = ParameterServer(team, torch.zeros(6, dtype=torch.float64))
        clock, met, slowest = 0, [], []
        for early in range(team.size):
            if team.rank != early:
                for _ in range(4):
                    clock += 1
                    server.stage().fill_(1.0)
                    answer = server.push_pull(clock=clock, least=clock).wait()
                    slowest.append(answer.clock - clock)
            met.append(server.arrive())
            barrier(team)
            clock = 4 * (early + 1)  # who has been away catches up
            server.stage().zero_()
            answer = server.push_pull(clock=clock, least=clock).wait()
            slowest.append(answer.clock - clock)
            server.arrive()
        server.leave()
        return met, slowest

    for met, slowest in world(on_team(work)):
        assert met == [0, 4, 8]
        # At most 1 ahead; one that has arrived counts for nothing
        assert set(slowest) <= {0, 1, NEVER}


# -- what is refused ------------------------------------------------------------------------------


BAD = {
    "too many": (Request("push", 1, elements=5).encode(), "rank 1 pushes 5 values to a shard of 4"),
    "too few": (Request("push_pull", 1, elements=3).encode(), "rank 1 pushes 3 values to a shard"),
    "none": (Request("push_pull", 1).encode(), "rank 1 pushes 0 values to a shard of 4"),
    "negative": (Request("push", 1, elements=-4).encode(), "rank 1 pushes -4 values to a shard"),
    "no kind": (torch.tensor([77, 0, 0, 0, 0, 0, 0]), "no request"),
    "negative kind": (torch.tensor([-1, 0, 0, 0, 0, 0, 0]), "no request"),
}


@pytest.mark.sampled
@worlds_of_several
@pytest.mark.parametrize("name", BAD)
def test_a_request_that_is_none_is_refused(world: World, name: str) -> None:
    """Pitfall 20: nothing is read beyond the shard; the server's own rank gets an OffbeatError."""
    header, want = BAD[name]

    def work(team: Team) -> str:
        server = ParameterServer(team, torch.zeros(4), servers=(0,))
        server.arrive()
        if team.rank == 1:  # a raw message
            team.fabric.send(header, destination=0, tag=1, what="test").wait()
        if team.rank > 0:
            return ""
        if world is gloo:
            for thread in threading.enumerate():
                if thread.name == "server of rank 1":
                    thread.join(20)
        else:
            team.host.sleep(1.0, "the message")
        with pytest.raises(offbeat.OffbeatError) as caught:
            server.pull().wait()
        return f"{type(caught.value).__name__}: {caught.value}"

    text = world(on_team(work))[0]
    assert text.startswith("OffbeatError: "), text
    assert want in text


# -- the end --------------------------------------------------------------------------------------


def leave(rank: int, size: int) -> Any:
    team = Team(TorchCommunicator(None, timeout_seconds=20))
    names = []
    for _ in range(2):  # a second server, after the first one has ended
        before = {thread.ident for thread in threading.enumerate()}
        server = ParameterServer(team, torch.zeros(4), servers=(0, 1))
        server.push_pull().wait()
        new = [t for t in threading.enumerate() if t.ident not in before and t.name != "messages"]
        server.arrive()
        server.leave()
        server.leave()
        for thread in new:
            thread.join(5)
        names.append((len(new), [t.name for t in new if t.is_alive()]))
    team.close(together=True)
    return names


def test_leaving_ends_the_threads() -> None:
    """A server has one for each other rank, and none after all have left."""
    for rank, names in enumerate(run(leave, workers=3)):
        assert names == [(2 if rank < 2 else 0, [])] * 2


def wait_in_vain(rank: int, size: int, dies: bool, beside: bool) -> Any:
    team = Team(TorchCommunicator(None, timeout_seconds=0.3, health_seconds=0.6))
    server = ParameterServer(team, torch.zeros(6))
    server.stage().fill_(1.0)
    server.push_pull(clock=1, least=1).wait()
    meet("all have been answered", [0, 1, 2])
    text, seconds = "", 0.0
    if rank == 1 and dies:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank != 1:  # which never comes to clock 2
        started = time.perf_counter()
        try:
            server.stage().fill_(1.0)
            if beside:
                server.begin("push_pull", clock=2, least=2)
                server.take(wait=True)
            else:
                server.push_pull(clock=2, least=2).wait()
        except offbeat.CommunicationError as error:
            text, seconds = f"{type(error).__name__}: {error}", time.perf_counter() - started
    meet("all have seen it", [0, 2] if dies else [0, 1, 2])
    team.close()
    alive = [thread.name for thread in threading.enumerate() if "server" in thread.name]
    return text, seconds, alive


@pytest.mark.parametrize("beside", [False, True])
def test_a_pull_that_waits_in_vain_names_who_keeps_it_waiting(beside: bool) -> None:
    """Pitfall 19: in finite time, with the knob to turn; alive but stuck; close() ends threads."""
    results = run(wait_in_vain, False, beside, workers=3)
    assert [alive for *_, alive in results] == [[], [], []]
    for rank in (0, 2):
        text, seconds, _ = results[rank]
        assert text.startswith(f"CommunicationTimeout: rank {rank}: "), text
        assert "push_pull at" in text
        assert "timeout_seconds=0.3" in text
        assert "no answer from rank 1, busy elsewhere or stuck" in text
        assert 0.28 <= seconds < 8


@pytest.mark.parametrize("beside", [False, True])
def test_a_dead_worker_is_named_at_once(beside: bool) -> None:
    """Long before the others' clocks would time out; close() ends the threads."""
    results = run(wait_in_vain, True, beside, workers=3, may_die=(1,))
    for rank in (0, 2):
        text, seconds, alive = results[rank]
        assert text.startswith("CommunicationError: "), text
        assert "lost the connection to rank 1, which died" in text
        assert seconds < 8
        assert alive == []


def refuse_after_the_end(rank: int, size: int) -> str:
    team = Team(TorchCommunicator(None, timeout_seconds=20))
    server = ParameterServer(team, torch.zeros(6))
    server.push_pull().wait()
    server.arrive()
    server.leave()
    team.close(together=True)
    with pytest.raises(offbeat.CommunicationError) as caught:
        server.pull().wait()
    return str(caught.value)


def test_a_request_after_the_end_says_so() -> None:
    """Of the communicator under the server, at once."""
    for text in run(refuse_after_the_end, workers=2):
        assert "after this worker has left: attach again" in text


def outlive(rank: int, size: int, beside: bool) -> Any:
    """Rank 0's own shard holds an answer back for rank 1, which dies."""
    team = Team(TorchCommunicator(None, timeout_seconds=20, health_seconds=1.0))
    server = ParameterServer(team, torch.zeros(3), servers=(0,))
    team.fabric.sum(torch.zeros(1), what="a barrier").wait()
    store = dist.group.WORLD.get_group_store()
    if rank == 1:
        store.wait(["asked"])
        os._exit(1)
    started = time.monotonic()
    wait: Any = server.settle
    if beside:
        server.begin("push_pull", clock=1, least=1)
    else:
        wait = server.push_pull(clock=1, least=1).wait
    store.set("asked", "")
    with pytest.raises(offbeat.CommunicationError, match="rank 1") as caught:
        wait()
    return str(caught.value), time.monotonic() - started


@pytest.mark.parametrize("beside", [False, True])
def test_what_is_held_back_for_a_dead_worker_fails_at_once(beside: bool) -> None:
    """Not after the time-out of 20 s, though no message of its is awaited."""
    text, seconds = run(outlive, beside, workers=2, may_die=(1,))[0]
    assert "lost the connection to rank 1" in text
    assert seconds < 10
