"""The parameter server by itself: values, clocks, meetings, what it refuses, and how it ends."""

import io
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import offbeat
from offbeat.fabric import Accounting, Communicator, SingleCommunicator, TorchCommunicator
from offbeat.fabric.parameter_server import ParameterServer
from offbeat.fabric.shard import NEVER, Answer, Request, Rule, Shard
from offbeat.strategies.downpour import _Optimize
from workers import run

Function = Callable[[Communicator], Any]
World = Callable[[Function], list[Any]]

STEP_SECONDS = 0.05


def _on_gloo(rank: int, size: int, function: Function) -> Any:
    result = function(TorchCommunicator(None, timeout_seconds=20))
    dist.barrier()  # who leaves early would end connections that others still need
    return result


def gloo(function: Function) -> list[Any]:
    return run(_on_gloo, function, workers=3)


def single(function: Function) -> list[Any]:
    return [function(SingleCommunicator())]


def simulated(function: Function) -> list[Any]:
    return offbeat.simulate(
        lambda: function(dist.group.WORLD.make_communicator()),  # type: ignore[union-attr]
        workers=3,
        network=offbeat.Network("100Mbit/s"),
        compute=offbeat.Compute(STEP_SECONDS),
    ).results


every_world = pytest.mark.parametrize(
    "world", [pytest.param(w, id=w.__name__) for w in (gloo, single, simulated)]
)
both_worlds = pytest.mark.parametrize(
    "world", [pytest.param(w, id=w.__name__) for w in (gloo, simulated)]
)


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


@every_world
@pytest.mark.parametrize("elements", [1, 2, 7, 1000])
@pytest.mark.parametrize("servers", [None, (1,), (0, 2), (2, 0, 1)], ids=str)
def test_the_vector_lies_in_shards_on_the_servers(
    world: World, servers: tuple[int, ...] | None, elements: int
) -> None:
    """In their order, of sizes that differ by one at most, empty ones too; a pull is the whole."""

    def work(fabric: Communicator) -> Any:
        places = None if servers is None or fabric.size == 1 else servers
        server = ParameterServer(fabric, initial(elements), servers=places)
        shard = None if server.shard is None else server.shard.values.clone()
        server.stage().zero_()
        server.pull().wait()
        before = server.values.clone()
        server.arrive()
        server.stage().copy_(pushed(fabric.rank, 0, elements))
        server.push_pull().wait()
        server.arrive()
        server.pull().wait()
        after = server.values.clone()
        server.arrive()
        server.leave()
        return shard, before, after

    results = world(work)
    serving = [rank for rank in servers or range(3) if len(results) > 1] or [0]
    parts = [results[rank][0] for rank in serving]
    assert all((shard is not None) == (rank in serving) for rank, (shard, *_) in enumerate(results))
    assert torch.equal(torch.cat(parts), initial(elements))
    sizes = [part.numel() for part in parts]
    assert max(sizes) - min(sizes) <= 1
    want = total([pushed(rank, 0, elements) for rank in range(len(results))], initial(elements))
    for _, before, after in results:
        assert torch.equal(before, initial(elements))
        assert torch.equal(after, want)


@every_world
def test_a_worker_finds_its_own_pushes_in_what_it_pulls(world: World) -> None:
    """Requests of one worker are served in their order, whether or not it waits for them."""

    def work(fabric: Communicator) -> Any:
        server = ParameterServer(fabric, torch.zeros(4 * fabric.size, dtype=torch.float64))
        seen = []
        for step in range(1, 9):  # each worker adds to coordinates of its own
            server.stage().zero_()
            server.values[fabric.rank :: fabric.size] = step
            if step % 3:
                server.push()
                server.pull().wait()
            else:
                server.push_pull().wait()
            seen.append(server.values[fabric.rank :: fabric.size].tolist())
        server.arrive()
        server.leave()
        return seen

    for seen in world(work):
        assert seen == [[step * (step + 1) / 2] * 4 for step in range(1, 9)]


@every_world
def test_concurrent_pushes_add_up_exactly(world: World) -> None:
    """Forty pushes of every worker, with pulls in between, lose nothing and never go back."""

    def work(fabric: Communicator) -> Any:
        server = ParameterServer(fabric, torch.zeros(7, dtype=torch.float64))
        rising, last = True, torch.zeros(7, dtype=torch.float64)
        for number in range(40):
            server.stage().copy_(pushed(fabric.rank, number))
            if number % 5 == fabric.rank:
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

    results = world(work)
    pushes = [pushed(rank, number) for rank in range(len(results)) for number in range(40)]
    want = total(pushes, torch.zeros(7))
    for rising, end, version in results:
        assert rising
        assert torch.equal(end, want)
        assert version == 40 * len(results)


@both_worlds
def test_the_rule_decides_what_a_push_does(world: World) -> None:
    """It gets the shard, the values and the request's number, and chooses the answer."""

    class Scaled(Rule):
        def push(self, shard: Tensor, values: Tensor, *, source: int, value: float) -> None:
            self.before = shard.clone()
            shard.add_(values, alpha=value)

        def answer(self, shard: Tensor, *, source: int) -> Tensor:
            return -self.before

    def work(fabric: Communicator) -> Any:
        server = ParameterServer(fabric, initial(5), rule=Scaled)
        answers = []
        for turn in range(fabric.size):  # one after the other
            if turn == fabric.rank:
                server.stage().fill_(1.0)
                server.push_pull(value=0.1 * (turn + 1)).wait()
                answers.append(server.values.clone())
            server.arrive()
        server.pull().wait()
        end = server.values.clone()
        server.arrive()
        server.leave()
        return answers[0], end

    before, results = initial(5), world(work)
    for rank, (answer, _) in enumerate(results):
        assert torch.equal(answer, -before)
        before = before + 0.1 * (rank + 1)
    for _, end in results:
        torch.testing.assert_close(end, before, rtol=0, atol=1e-15)


@both_worlds
def test_bytes_are_counted_where_they_are_sent(world: World) -> None:
    """A push counts header and values for other ranks; a pull its header, and what it brings."""

    def work(fabric: Communicator) -> Any:
        account = Accounting(fabric)
        server = ParameterServer(account, torch.zeros(9, dtype=torch.float64))
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

    header, others = 8 * 8, 2  # eight int64 to each of two other ranks, 3 float64 each
    values = 2 * 3 * 8
    for counts, pulled in world(work):
        assert counts == [header * others + values, header * others, header * others + values]
        assert pulled == [0, values, 2 * values]


# -- clocks ---------------------------------------------------------------------------------------


@both_worlds
def test_a_pull_waits_for_the_slowest(world: World) -> None:
    """With ``least`` it brings every push of clocks up to there, from all workers."""

    def work(fabric: Communicator) -> Any:
        server = ParameterServer(fabric, torch.zeros(fabric.size, dtype=torch.float64))
        server.arrive()
        start = fabric.now()
        for clock in range(1, 4):
            if fabric.rank == 0:
                fabric.computed()  # only rank 0 takes time
            server.stage().zero_()
            server.values[fabric.rank] = 1.0
            server.push(clock=clock)
        answer = server.pull(least=3).wait()
        seconds, values = fabric.now() - start, server.values.tolist()
        server.arrive()
        server.leave()
        return answer.clock, values, seconds

    for clock, values, seconds in world(work):
        assert clock == 3
        assert values == [3.0, 3.0, 3.0]
        assert world is gloo or 3 * STEP_SECONDS <= seconds <= 3 * STEP_SECONDS + 0.01


@both_worlds
def test_clocks_have_64_bits(world: World) -> None:
    """Beyond 2³² and up to half the marker for never."""
    clocks = [2**31 + 1, 2**40, NEVER // 2]

    def work(fabric: Communicator) -> Any:
        server = ParameterServer(fabric, torch.zeros(4))
        seen = []
        for clock in clocks:
            server.stage().fill_(1.0)
            answer = server.push_pull(clock=clock + fabric.rank, least=clock).wait()
            seen.append(answer.clock)
        met = server.arrive()
        server.leave()
        return seen, met

    for seen, met in world(work):
        assert all(clock <= got <= clock + 2 for clock, got in zip(clocks, seen, strict=True))
        assert met == clocks[-1]


class Desk:
    """A shard without a network: remembers who was answered, when and with what."""

    def __init__(self, workers: int = 3, elements: int = 2, rule: Rule | None = None) -> None:
        values = torch.zeros(elements, dtype=torch.float64)
        self.shard = Shard(values, Rule() if rule is None else rule, workers)
        self.answers: list[tuple[str, int, list[float] | None]] = []
        self.headers: list[Answer] = []

    def ask(self, name: str, kind: Any, source: int, push: float | None = None, **more: int) -> Any:
        def deliver(answer: Answer, values: Tensor | None) -> None:
            self.headers.append(answer)
            self.answers.append((name, answer.clock, None if values is None else values.tolist()))

        values = None if push is None else torch.full_like(self.shard.values, push)
        self.shard.handle(Request(kind, source, **more), values, deliver)
        return [name for name, *_ in self.answers]


def test_waiting_requests_are_answered_in_the_order_of_their_arrival() -> None:
    """Those that are due; the others go on waiting, and values are those of the moment."""
    desk = Desk()
    desk.ask("push", "push", 1, 1.0, clock=2)
    desk.ask("push", "push", 2, 10.0, clock=3)
    assert desk.ask("b waits for 2", "pull", 2, least=2) == []
    assert desk.ask("a waits for 1", "pull", 1, least=1) == []
    assert desk.ask("now", "pull", 0) == ["now"]
    assert desk.ask("push", "push", 0, 100.0, clock=1) == ["now", "a waits for 1"]
    desk.ask("push", "push", 0, 100.0, clock=2)
    assert desk.answers == [
        ("now", 0, [11.0, 11.0]),
        ("a waits for 1", 1, [111.0, 111.0]),
        ("b waits for 2", 2, [211.0, 211.0]),
    ]
    desk.ask("x", "pull", 2, least=3)
    desk.ask("y", "pull", 1, least=3)
    desk.ask("z", "push_pull", 0, 0.0, clock=9, least=3)
    assert desk.ask("push", "push", 1, 0.0, clock=3)[3:] == ["x", "y", "z"]


def test_staleness_counts_from_the_download() -> None:
    """Pitfall 17: pushes of others between a worker's last download and its push."""
    desk = Desk()
    pull, push = "pull", "push"
    sequence: list[tuple[str, int, int | None]] = [  # kind, worker, staleness by hand
        (push, 0, 0),  # all start from the initial values
        (push, 1, 1),  # it has not seen the push of 0
        (push, 1, 1),  # its own push does not make it staler
        (pull, 1, None),
        (push, 1, 0),
        (push, 2, 4),  # 0, 1, 1, 1
        (push, 0, 4),  # 1, 1, 1, 2
        ("push_pull", 2, 5),  # 0, 1, 1, 1 and then 0 again
        (push, 0, 5),  # 1, 1, 1, 2, 2
        (push, 2, 1),  # downloaded with its push: only 0 since
        (pull, 0, None),
        (pull, 0, None),
        (push, 0, 0),
    ]
    want: dict[int, int] = {}
    for kind, worker, staleness in sequence:
        desk.ask("", kind, worker, None if kind == pull else 1.0)
        if staleness is not None:
            want[staleness] = want.get(staleness, 0) + 1
        assert desk.shard.staleness == want
    assert desk.shard.version == sum(want.values()) == 10


def test_a_waiting_pull_downloads_when_it_is_answered() -> None:
    """Pushes that arrive while it waits are part of the answer, so they do not make it stale."""
    desk = Desk(workers=2)
    desk.ask("", "push_pull", 0, 1.0, clock=1, least=1)
    desk.ask("", "push", 1, 1.0)
    desk.ask("", "push", 1, 1.0, clock=1)
    assert desk.answers == [("", 1, [3.0, 3.0])]
    desk.ask("", "push", 0, 1.0)
    assert desk.shard.staleness == {0: 2, 1: 2}


# -- meetings -------------------------------------------------------------------------------------


@every_world
def test_workers_meet_whatever_each_has_asked_before(world: World) -> None:
    """Again and again, after unequal numbers of requests; all get the slowest worker's clock."""

    def work(fabric: Communicator) -> Any:
        server = ParameterServer(fabric, torch.zeros(fabric.size, dtype=torch.float64))
        clock, met, sums = 0, [], []
        for round_ in range(6):
            for _ in range(5 * ((fabric.rank + round_) % fabric.size)):
                clock += 1
                server.stage().fill_(1.0)
                server.push_pull(clock=clock).wait()
            met.append((clock, server.arrive()))
            fabric.any(False, what="everyone has been told").wait()
            server.pull().wait()
            sums.append(server.values.tolist())
            server.arrive()
        server.leave()
        return met, sums

    results = world(work)
    size = len(results)
    for round_ in range(6):
        clocks = [met[round_][0] for met, _ in results]
        want = [5 * sum((rank + r) % size for r in range(round_ + 1)) for rank in range(size)]
        assert clocks == want
        for met, sums in results:
            assert met[round_][1] == min(clocks)
            assert sums[round_] == [sum(clocks)] * size


@both_worlds
def test_nobody_waits_for_one_that_has_arrived(world: World) -> None:
    """Its clock does not count, also for pulls that wait already; afterwards it does again."""

    def work(fabric: Communicator) -> Any:
        server = ParameterServer(fabric, torch.zeros(6, dtype=torch.float64))
        clock, met, slowest = 0, [], []
        for early in range(fabric.size):
            if fabric.rank != early:
                for _ in range(4):
                    clock += 1
                    server.stage().fill_(1.0)
                    answer = server.push_pull(clock=clock, least=clock).wait()
                    slowest.append(answer.clock - clock)
            met.append(server.arrive())
            fabric.any(False, what="everyone has been told").wait()
            clock = 4 * (early + 1)  # who has been away catches up
            server.stage().zero_()
            answer = server.push_pull(clock=clock, least=clock).wait()
            slowest.append(answer.clock - clock)
            server.arrive()
        server.leave()
        return met, slowest

    for met, slowest in world(work):
        assert met == [0, 4, 8]
        # At most 1 ahead; one that has arrived counts for nothing
        assert set(slowest) <= {0, 1, NEVER}


def test_an_arrival_is_answered_when_others_give_a_sign_of_life() -> None:
    """So that waiting for one that trains on does not time out; the waiting asks again."""
    desk = Desk(workers=2)
    assert desk.ask("first", "arrive", 0) == [], "nothing has happened"
    desk.ask("push", "push", 1, 1.0, clock=5)
    assert desk.answers == [("first", 5, None)]
    last = desk.headers[-1]
    assert not last.met
    assert last.seen > 0
    assert desk.ask("again", "arrive", 0, seen=last.seen)[-1] == "first"
    assert desk.ask("met", "arrive", 1) == ["first", "again", "met"]
    assert [header.met for header in desk.headers] == [False, True, True]
    assert [clock for _, clock, _ in desk.answers] == [5, 0, 0], "all clocks count again"
    desk.ask("late", "arrive", 0, meeting=0, seen=99)
    assert desk.headers[-1].met, "that meeting is over"
    assert desk.ask("next", "arrive", 0, meeting=1, seen=99)[-1] == "late", "the next is not"


def test_who_asks_again_late_is_told_the_meetings_clock() -> None:
    """All get the same clock, that of the slowest, although one has gone on to the next meeting."""
    desk = Desk(workers=3)
    for worker, clock in ((0, 20), (1, 30), (2, 25)):
        desk.ask("push", "push", worker, 1.0, clock=clock)
    desk.ask("a sign of life", "arrive", 1)
    desk.ask("0 waits", "arrive", 0, seen=99)
    desk.ask("2 is the last", "arrive", 2, seen=99)
    desk.ask("0 goes on", "arrive", 0, meeting=1, seen=99)
    desk.ask("1 asks again", "arrive", 1, seen=99)
    clocks = {name: clock for name, clock, _ in desk.answers}
    assert clocks["0 waits"] == clocks["2 is the last"] == 20
    assert clocks["1 asks again"] == 20


# -- what is refused ------------------------------------------------------------------------------


BAD = {
    "too many": (Request("push", 1, elements=5).encode(), "rank 1 pushes 5 values to a shard of 4"),
    "too few": (Request("push_pull", 1, elements=3).encode(), "rank 1 pushes 3 values to a shard"),
    "none": (Request("push_pull", 1).encode(), "rank 1 pushes 0 values to a shard of 4"),
    "negative": (Request("push", 1, elements=-4).encode(), "rank 1 pushes -4 values to a shard"),
    "no kind": (torch.tensor([77, 0, 0, 0, 0, 0, 0, 0]), "no request"),
    "negative kind": (torch.tensor([-1, 0, 0, 0, 0, 0, 0, 0]), "no request"),
}


@both_worlds
@pytest.mark.parametrize("name", BAD)
def test_a_request_that_is_none_is_refused(world: World, name: str) -> None:
    """Pitfall 20: nothing is read beyond the shard; the server's own rank gets an OffbeatError."""
    header, want = BAD[name]

    def work(fabric: Communicator) -> str:
        server = ParameterServer(fabric, torch.zeros(4), servers=(0,))
        server.arrive()
        if fabric.rank == 1:  # a raw message
            fabric.send(header, destination=0, tag=1, what="test").wait()
        for _ in range(300 if fabric.rank == 0 else 0):
            fabric.computed()  # a message takes virtual time
            if world is gloo:
                time.sleep(0.005)
            try:
                server.pull().wait()
            except Exception as error:
                return f"{type(error).__name__}: {error}"
        return "nothing was raised"

    text = world(work)[0]
    assert text.startswith("OffbeatError: "), text
    assert want in text


# -- checkpoints ----------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [Rule, lambda: _Optimize("adagrad", 0.1)], ids=["add", "adagrad"])
def test_a_shard_goes_on_where_it_was_saved(make: Callable[[], Rule]) -> None:
    """Values, clocks, counters and the rule's memory, through plain values."""
    generator = torch.Generator().manual_seed(3)
    requests = [
        (["push", "push_pull", "pull"][int(kind)], int(worker), float(value), int(clock))
        for kind, worker, value, clock in zip(
            torch.randint(0, 3, (60,), generator=generator),
            torch.randint(0, 3, (60,), generator=generator),
            torch.randn(60, generator=generator, dtype=torch.float64),
            torch.arange(60) // 3,
            strict=True,
        )
    ]

    def serve(desk: Desk, some: list[tuple[str, int, float, int]]) -> None:
        for kind, worker, value, clock in some:
            push = kind != "pull"
            more = {"clock": clock} if push else {}
            desk.ask("", kind, worker, value if push else None, **more)

    whole, first, second = (Desk(rule=make()) for _ in range(3))
    serve(whole, requests)
    serve(first, requests[:31])
    state = torch.load(_saved(first.shard.state_dict()), weights_only=True)
    serve(first, requests[31:40])  # what was saved is a copy
    second.shard.load_state_dict(state)
    serve(second, requests[31:])
    a, b = whole.shard.state_dict(), second.shard.state_dict()
    assert a.keys() == b.keys()
    for key in a.keys() - {"values", "rule"}:
        assert a[key] == b[key], key
    assert torch.equal(a["values"], b["values"])
    assert whole.answers[-5:] == second.answers[-5:]
    assert whole.shard.slowest() == second.shard.slowest()


def _saved(state: dict[str, Any]) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


# -- the end --------------------------------------------------------------------------------------


def leave(rank: int, size: int) -> Any:
    fabric = TorchCommunicator(None, timeout_seconds=20)
    names = []
    for _ in range(2):  # a second server, after the first one has ended
        before = {thread.ident for thread in threading.enumerate()}
        server = ParameterServer(fabric, torch.zeros(4), servers=(0, 1))
        server.push_pull().wait()
        new = [t for t in threading.enumerate() if t.ident not in before]
        server.arrive()
        server.leave()
        server.leave()
        for thread in new:
            thread.join(5)
        names.append((len(new), [t.name for t in new if t.is_alive()]))
    dist.barrier()
    return names


def test_leaving_ends_the_threads() -> None:
    """A server has one for each other rank, and none after all have left."""
    for rank, names in enumerate(run(leave, workers=3)):
        assert names == [(2 if rank < 2 else 0, [])] * 2


def meet(folder: str, rank: int, ranks: list[int]) -> None:
    """Wait until all of ``ranks`` are here; not through a communicator."""
    store = dist.FileStore(f"{folder}/meeting", -1)
    store.set(str(rank), "here")
    store.wait([str(other) for other in ranks], timedelta(seconds=30))


def wait_in_vain(rank: int, size: int, folder: str, dies: bool) -> Any:
    fabric = TorchCommunicator(None, timeout_seconds=1.5)
    server = ParameterServer(fabric, torch.zeros(6))
    server.stage().fill_(1.0)
    server.push_pull(clock=1, least=1).wait()
    ready = Path(folder, "ready")
    ready.mkdir(exist_ok=True)
    meet(str(ready), rank, [0, 1, 2])  # all have been answered
    text, seconds = "", 0.0
    if rank == 1 and dies:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank != 1:  # which never comes to clock 2
        server.stage().fill_(1.0)
        started = time.perf_counter()
        try:
            server.push_pull(clock=2, least=2).wait()
        except offbeat.CommunicationError as error:
            text, seconds = f"{type(error).__name__}: {error}", time.perf_counter() - started
    meet(folder, rank, [0, 2] if dies else [0, 1, 2])
    server.close()
    alive = [thread.name for thread in threading.enumerate() if "server" in thread.name]
    return text, seconds, alive


def test_a_pull_that_waits_in_vain_times_out(tmp_path: Path) -> None:
    """Pitfall 19: in finite time, with the knob to turn; close() ends the threads."""
    results = run(wait_in_vain, str(tmp_path), False, workers=3)
    for rank in (0, 2):
        text, seconds, alive = results[rank]
        assert text.startswith(f"CommunicationTimeout: rank {rank}: "), text
        assert "timeout_seconds=1.5" in text
        assert 1.4 <= seconds < 8
        assert alive == []


def test_who_keeps_a_pull_waiting_is_named(tmp_path: Path) -> None:
    """Pitfall 19: a worker that is stuck but alive, too."""
    results = run(wait_in_vain, str(tmp_path), False, workers=3)
    for rank in (0, 2):
        assert "no answer from rank 1" in results[rank][0], results[rank][0]


def test_a_dead_worker_is_named_at_once(tmp_path: Path) -> None:
    """Long before the others' clocks would time out; close() ends the threads."""
    results = run(wait_in_vain, str(tmp_path), True, workers=3, may_die=(1,))
    for rank in (0, 2):
        text, seconds, alive = results[rank]
        assert text.startswith("Communication"), text
        assert "lost the connection to rank 1, which died" in text
        assert seconds < 8
        assert alive == []
