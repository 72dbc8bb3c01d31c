"""The parameter server over a lossy wire: what arrives, what is kept, and what both ends hold."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fabric.communicators import Function, World, gloo, simulated, worlds_without_processes
from fabric.rounding import most, values
from offbeat.fabric import Team
from offbeat.fabric.link import Link, Rounding, travelling_bytes
from offbeat.fabric.parameter_server import ParameterServer
from offbeat.fabric.shard import Rule

ELEMENTS = 5000  # in shards of 1666, 1667 and 1667: four blocks each
every_precision = pytest.mark.parametrize("precision", ["bfloat16", "int8", "int4", "int2"])


def on_team(work: Callable[[Team], Any]) -> Function:
    return lambda fabric: work(Team(fabric))


def serve(team: Team, precision: Any, dtype: torch.dtype = torch.float64, **more: Any) -> Any:
    """A server of zeros."""
    start = torch.zeros(more.pop("elements", ELEMENTS), dtype=dtype)
    return ParameterServer(team, start, precision=precision, **more)


def settled(server: ParameterServer) -> Tensor:
    """All have come; what the shards hold."""
    server.arrive()
    seen = server.look()
    server.arrive()
    server.leave()
    return seen


def of_own_shard(team: Team) -> slice:
    return slice(ELEMENTS * team.rank // team.size, ELEMENTS * (team.rank + 1) // team.size)


# -- changes --------------------------------------------------------------------------------------


@every_precision
def test_what_is_pushed_and_what_is_kept_are_what_was_handed_over(precision: str) -> None:
    """To float64; what is kept is a rounding error, of nothing in the own shard."""

    def work(team: Team) -> Any:
        server = serve(team, precision)
        handed = values(team.rank, ELEMENTS, torch.float64)
        kept = handed.clone()
        server.hand_over(kept)
        server.push()
        return handed, kept, settled(server), of_own_shard(team)

    results = simulated(on_team(work))
    arrived = sum(handed - kept for handed, kept, *_ in results)
    for me, (handed, kept, seen, own) in enumerate(results):
        torch.testing.assert_close(seen, arrived, rtol=1e-14, atol=1e-14)
        assert torch.equal(seen, results[0][2])
        assert not kept[own].any()
        for rank in range(3):
            shard = results[rank][3]
            assert (kept[shard].abs() <= most(handed[shard], precision)).all()
            assert rank == me or kept[shard].any()


@every_precision
def test_nothing_is_lost_over_time(precision: str) -> None:
    """Sixty pushes and pulls at random: z and what the workers still hold are all updates."""

    def work(team: Team) -> Any:
        server, kept = serve(team, precision), torch.zeros(ELEMENTS, dtype=torch.float64)
        total = torch.zeros_like(kept)
        for turn in range(20):
            update = values(100 * team.rank + turn, ELEMENTS, torch.float64)
            kept += update
            total += update
            server.hand_over(kept)
            if (turn + team.rank) % 3:
                server.push_pull().wait()
            else:
                server.push()
        return total, kept, settled(server)

    results = simulated(on_team(work))
    want = sum(total for total, *_ in results)
    got = results[0][2] + sum(kept for _, kept, _ in results)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-11)
    assert any(kept.any() for _, kept, _ in results)


def test_the_last_push_travels_as_it_is() -> None:
    def work(team: Team) -> Any:
        server = serve(team, "int2")
        pushed = values(team.rank, ELEMENTS, torch.float64)
        server.stage().copy_(pushed)
        server.push_last()
        return pushed, settled(server)

    results = simulated(on_team(work))
    want = sum(pushed for pushed, _ in results)
    for _, seen in results:
        torch.testing.assert_close(seen, want, rtol=1e-14, atol=1e-14)


# -- mirrors --------------------------------------------------------------------------------------


class Pull(Rule):
    """z ← z + d, d = (x − z)/4, answered with d."""

    def push(self, shard: Tensor, values: Tensor, *, source: int) -> None:
        self.move = (values - shard) / 4
        if source in self.links:
            self.links[source].round(self.move)
        shard.add_(self.move)

    def answer(self, shard: Tensor, *, source: int) -> Tensor:
        return self.move


@pytest.mark.sampled
@pytest.mark.parametrize("pushes", ["changes", "models"])
@pytest.mark.parametrize(
    ("world", "precision", "dtype"),
    [
        (gloo, "int8", torch.float32),
        (simulated, "int8", torch.float32),
        (simulated, "int2", torch.float64),
        (simulated, "bfloat16", torch.float32),
    ],
)
def test_both_ends_hold_the_same_mirror(
    world: World, pushes: Any, precision: str, dtype: torch.dtype
) -> None:
    """To the bit, after 25 requests of each worker in an order of its own; looks leave it."""

    def work(team: Team) -> Any:
        rule = Pull if pushes == "models" else Rule
        server = serve(team, precision, dtype, pushes=pushes, rule=rule)
        kept = torch.zeros(ELEMENTS, dtype=dtype)
        for turn in range(25):
            news = values(100 * team.rank + turn, ELEMENTS, dtype)
            if pushes == "models":
                server.stage().copy_(news)
            else:
                kept += news
                server.hand_over(kept)
            choice = (7 * turn + team.rank) % 5
            if choice == 0:
                server.push()
                before = server.look()
                server.pull().wait()
                assert server.shard is not None
                assert before.isfinite().all()
            elif choice == 1:
                server.begin("push_pull")
                server.take(wait=True)
            else:
                server.push_pull().wait()
        server.arrive()
        here = {i: link.mirror.clone() for i, link in server._links.items()}
        there = {rank: link.mirror.clone() for rank, link in server.shard.links.items()}
        settled(server)
        return here, there

    results = world(on_team(work))
    for rank, (here, _) in enumerate(results):
        assert set(here) == {0, 1, 2} - {rank}
        for server, mirror in here.items():
            assert torch.equal(mirror, results[server][1][rank])
            assert mirror.any()


@every_precision
def test_repeated_pulls_come_nearer(precision: str) -> None:
    """What one pull has rounded the next one brings: each error is a rounding error of the last."""

    def work(team: Team) -> Any:
        server = serve(team, precision)
        handed = values(team.rank, ELEMENTS, torch.float64)
        server.hand_over(handed)
        server.push()
        server.arrive()
        model = server.look()
        seen = []
        for _ in range(4):
            server.pull().wait()
            seen.append(server.values.clone())
        settled(server)
        return model, seen, [server._places[i] for i in server._links], of_own_shard(team)

    for model, seen, places, own in simulated(on_team(work)):
        for pulled in seen:
            assert torch.equal(pulled[own], model[own])
        for place in places:
            error = model[place]
            for pulled in seen:
                last, error = error, model[place] - pulled[place]
                assert (error.abs() <= most(last, precision)).all()
            assert error.any() or precision == "bfloat16"


def test_a_model_that_is_pushed_is_received_up_to_its_rounding() -> None:
    """Relative to how far it has moved, not to its size; an answer is one of the change."""

    class Keep(Rule):
        received: Tensor

        def push(self, shard: Tensor, values: Tensor, *, source: int) -> None:
            if source == 1:
                self.received = values.clone()

        def answer(self, shard: Tensor, *, source: int) -> Tensor:
            return values(7, shard.numel(), torch.float64)

    rules = {}

    def rule() -> Rule:
        rules[len(rules)] = Keep()  # simulated workers make theirs in rank order
        return rules[len(rules) - 1]

    def work(team: Team) -> Any:
        server = serve(team, "int8", pushes="models", rule=rule, servers=(0,))
        model, seen = 1e4 * values(3, ELEMENTS, torch.float64), []
        for turn in range(4):
            model += values(turn, ELEMENTS, torch.float64)
            if team.rank == 1:
                server.stage().copy_(model)
                server.push_pull().wait()
                seen.append((model.clone(), server.values.clone()))
            server.arrive()
            if team.rank == 0:
                seen.append(rules[0].received)
            server.arrive()
        settled(server)
        return seen

    received, sent, _ = simulated(on_team(work))
    answer, last = values(7, ELEMENTS, torch.float64), torch.zeros(ELEMENTS).double()
    for (model, answered), got in zip(sent, received, strict=True):
        assert ((got - model).abs() <= most(model - last, "int8")).all()
        assert ((answered - answer).abs() <= most(answer, "int8")).all()
        last = got
    assert (last - model).abs().max() < 20


# -- bytes ----------------------------------------------------------------------------------------


BYTES = {"float32": 4 * 1667, "bfloat16": 4 * 1024, "int8": 4 * 516, "int4": 4 * 260, "int2": 528}


@pytest.mark.parametrize("precision", BYTES)
def test_bytes_are_those_of_the_payloads(precision: str) -> None:
    """Of four blocks for each of two others, each way, and headers; a look is no pull."""

    def work(team: Team) -> Any:
        server = serve(team, precision, torch.float32, elements=5001)
        counts = []
        for request in (server.push, server.push_pull, server.pull, server.look):
            before = team.account.payload_bytes
            server.hand_over(torch.ones(5001))
            handle = request()
            if request in (server.push_pull, server.pull):
                handle.wait()
            server.stage()
            counts.append(team.account.payload_bytes - before)
        pulled = server.pulled_bytes
        settled(server)
        return counts, pulled

    header, values = 2 * 7 * 8, 2 * BYTES[precision]
    for counts, pulled in simulated(on_team(work)):
        assert counts == [header + values, header + values, header, header]
        assert pulled == 2 * values


def test_what_is_not_shorter_travels_as_it_is() -> None:
    """129 float32 are as many bytes as a block of int8; 130 are more."""
    for elements, lossy in ((3 * 129, False), (3 * 130, True)):

        def work(team: Team, elements: int = elements) -> Any:
            server = serve(team, "int8", torch.float32, elements=elements)
            handed = torch.arange(elements) + 0.25
            kept = handed.clone()
            server.hand_over(kept)
            server.push_pull().wait()
            return server.lossy, kept, settled(server)

        for told, kept, seen in simulated(on_team(work)):
            assert told == bool(kept.any()) == lossy
            exact = torch.equal(seen, 3 * (torch.arange(elements) + 0.25))
            assert exact != lossy
    assert travelling_bytes(129, 4, "int8") == travelling_bytes(129, 4, "float32") == 516
    assert travelling_bytes(513, 4, "int4") == 520


@worlds_without_processes
def test_a_lone_worker_and_a_lone_server_round_nothing_of_their_own(world: World) -> None:
    """What does not travel is exact."""

    def work(team: Team) -> Any:
        server = serve(team, "int2", servers=(0,))
        kept = values(1, ELEMENTS, torch.float64)
        server.hand_over(kept)
        if team.rank == 0:
            server.push_pull().wait()
        exact = torch.equal(server.values, values(1, ELEMENTS, torch.float64))
        settled(server)
        return exact, bool(kept.any())

    assert world(on_team(work))[0] == (True, False)


# -- one end by itself ----------------------------------------------------------------------------


def test_long_vectors_are_rounded_as_short_ones() -> None:
    """In pieces of scratch memory: a vector of three is each of its blocks by itself."""
    elements = 2 * 512 * 512 + 700
    change = values(5, elements, torch.float32)

    def sent(part: Tensor) -> Tensor:
        size = int(travelling_bytes(part.numel(), 4, "int8"))
        ends = [
            Link(Rounding("int8"), size, torch.zeros_like(part), m) for m in ("sent", "received")
        ]
        ends[0].pack(part)
        ends[1].payload.copy_(ends[0].payload)
        ends[1].unpack(ends[1].mirror)
        assert torch.equal(ends[0].mirror, ends[1].mirror)
        return ends[1].mirror

    blocks = [sent(change[512 * i :][:512]) for i in (0, 511, 512, 1023, 1024, 1025)]
    whole = sent(change)
    for i, block in zip((0, 511, 512, 1023, 1024, 1025), blocks, strict=True):
        assert torch.equal(whole[512 * i :][:512], block)
