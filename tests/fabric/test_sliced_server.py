"""A parameter server between nodes of several workers: the whole vector, the same in a node."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import offbeat
from offbeat.errors import CommunicationError
from offbeat.fabric import Team, open_nodes
from offbeat.fabric.sliced_server import SlicedServer
from offbeat.simulate import Kill

LAYOUTS = [(1, 2), (2, 2), (2, 3), (3, 2)]
every_layout = pytest.mark.parametrize(("nodes", "workers"), LAYOUTS)


def between(
    nodes: int,
    workers: int,
    work: Callable[[Team, int], Any],
    bandwidth: str = "100Mbit/s",
    **options: Any,
) -> list[Any]:
    """Results of ``work(team, place in the node)`` in virtual time; those of a node follow."""

    def worker() -> Any:
        communicator, node = open_nodes(None, "auto", 20.0)
        return work(Team(communicator, node=node), dist.get_rank() % workers)

    return offbeat.simulate(
        worker,
        workers=nodes * workers,
        network=offbeat.Network(bandwidth, latency="1ms", workers_per_node=workers),
        compute=offbeat.Compute(0.001),
        **options,
    ).results


def initial(elements: int) -> Tensor:
    return torch.arange(elements, dtype=torch.float64) + 100


def pushed(node: int, number: int, elements: int) -> Tensor:
    """Small integers, so that any order gives the same sum."""
    generator = torch.Generator().manual_seed(1000 * node + number)
    return torch.randint(1, 50, (elements,), generator=generator).double()


@pytest.mark.sampled
@every_layout
@pytest.mark.parametrize("servers", [None, (0,)], ids=str)
def test_nodes_push_and_pull_the_whole_vector(
    nodes: int, workers: int, servers: tuple[int, ...] | None
) -> None:
    """Of any length; waited for, or beside the training; a look leaves ``values`` alone."""
    lengths = [1, 2, 7, 100]

    def work(team: Team, place: int) -> Any:
        found = []
        for elements in lengths:
            server = SlicedServer(team, initial(elements), servers=servers)
            server.stage().copy_(pushed(team.rank, 0, elements))
            server.push_pull(clock=1, least=1).wait()
            together = server.values.clone()
            changes = pushed(team.rank, 1, elements)
            server.hand_over(changes)
            server.begin("push_pull", clock=2, least=2)
            assert not server.free
            answer = server.take(wait=True)
            assert answer is not None
            beside = server.values.clone()
            assert server.free
            assert server.take() is None
            assert server.arrive() == 2
            server.stage().zero_()
            seen = server.look()
            left = bool(changes.any()) or bool(server.values.any())
            server.leave()
            found.append((together, beside, seen, answer.clock, left, server.pushed))
        return found

    for result in between(nodes, workers, work):
        for elements, (together, beside, seen, clock, left, count) in zip(
            lengths, result, strict=True
        ):
            first = initial(elements) + sum(pushed(n, 0, elements) for n in range(nodes))
            both = first + sum(pushed(n, 1, elements) for n in range(nodes))
            assert torch.equal(together, first)
            assert torch.equal(beside, both)
            assert torch.equal(seen, both)
            assert (clock, left, count) == (2, False, 2)


def test_an_answer_is_there_when_all_of_a_node_have_theirs() -> None:
    """One worker's part comes 8 ms before the other's, and is not taken before."""

    def work(team: Team, place: int) -> Any:
        server = SlicedServer(team, torch.zeros(4000))
        server.begin("push_pull", clock=1)
        seen = []
        while not seen or seen[-1][1] is None:
            team.host.sleep(0.002, "a part of a step")
            mine = server._inner.answer() is not None
            answer = server.take()
            seen.append((mine, None if answer is None else answer.clock))
        server.leave()
        return seen

    results = between(2, 2, work, bandwidth="4Mbit/s")
    for one, other in (results[:2], results[2:]):
        assert [taken for _, taken in one] == [taken for _, taken in other]
        assert any(a != b for (a, _), (b, _) in zip(one, other, strict=True)), "they differ"
        assert all(mine for mine, taken in (one[-1], other[-1]))


@pytest.mark.parametrize("beside", [True, False])
def test_the_clock_of_an_answer_is_the_least(beside: bool) -> None:
    """Of all its parts, one of which may have seen the other node's push, and one not."""

    def work(team: Team, place: int) -> Any:
        server, clocks = SlicedServer(team, torch.zeros(4000), servers=(0,)), []
        for clock in range(1, 12):
            team.host.sleep(0.003, "a step")
            if beside:
                server.begin("push_pull", clock=clock)
                mine = server._inner.answer(wait=True)
                answer = server.take(wait=True)
            else:
                handle = server.push_pull(clock=clock)
                mine = handle._inner.wait()  # type: ignore[attr-defined]
                answer = handle.wait()
            assert mine is not None
            assert answer is not None
            clocks.append((mine.clock, answer.clock))
        server.arrive()
        server.leave()
        return clocks

    results = between(2, 2, work, bandwidth="4Mbit/s")
    for one, other in (results[:2], results[2:]):
        for (mine, told), (theirs, same) in zip(one, other, strict=True):
            assert told == same == min(mine, theirs)
    assert any(a[0] != b[0] for a, b in zip(results[0], results[1], strict=True)), "they differ"


def test_the_answer_to_a_push_brings_nothing_into_the_node() -> None:
    def work(team: Team, place: int) -> Any:
        server, gathered = SlicedServer(team, torch.zeros(8)), []
        server._gather = lambda vector, what: gathered.append(what)  # type: ignore[method-assign]
        for kind in ("push", "push_pull", "push"):
            server.begin(kind, clock=1)
            server.take(wait=True)
        server.arrive()
        server.leave()
        return gathered

    assert between(2, 2, work) == [["an answer of the parameter server"]] * 4


@pytest.mark.parametrize("elements", [6000, 2050])
def test_what_rounding_takes_away_is_the_same_in_a_node(elements: int) -> None:
    """And is all that is missing: pushed at last as it is, the sum is exact.

    One of the slices of 2050 numbers has a shard too short to be rounded.
    """

    def work(team: Team, place: int) -> Any:
        server = SlicedServer(team, torch.zeros(elements), precision="int8")
        generator, kept = torch.Generator().manual_seed(team.rank), []
        left = torch.zeros(elements)
        for step in range(3):
            left += torch.randn(elements, generator=generator)
            server.hand_over(left)
            kept.append(left.clone())
            server.begin("push_pull", clock=step + 1, least=step + 1)
            server.take(wait=True)
            kept.append(server.values.clone())
        server.stage().copy_(left)
        server.push_last(clock=4)
        server.arrive()
        seen = server.look()
        server.leave()
        return kept, seen, server.lossy

    results = between(2, 2, work)
    sums = torch.zeros(elements)
    for node in range(2):
        generator = torch.Generator().manual_seed(node)
        for _ in range(3):
            sums += torch.randn(elements, generator=generator)
    for rank, (kept, seen, lossy) in enumerate(results):
        assert lossy
        assert kept[-2].any()
        for one, other in zip(kept, results[rank ^ 1][0], strict=True):
            assert torch.equal(one, other)
        torch.testing.assert_close(seen, sums, rtol=0, atol=1e-5)


def test_a_server_goes_on_from_its_slices() -> None:
    """With an answer that was not taken, which is whole again when it is."""

    def work(team: Team, place: int) -> Any:
        server = SlicedServer(team, initial(7))
        server.stage().copy_(pushed(team.rank, 0, 7))
        server.begin("push_pull", clock=3, least=3)
        server.settle()
        server.arrive()
        state = server.state_dict()
        team.fabric.sum(torch.zeros(1), what="all have copied").wait()
        assert state["shard"]["values"].numel() <= 2, "a shard of a slice"
        server.take()
        server.stage().zero_()
        server.begin("push", clock=9)
        server.take(wait=True)
        server.arrive()
        server.load_state_dict(state)
        assert not server.free
        answer = server.take()
        assert answer is not None
        taken, clock = server.values.clone(), server.arrive()
        server.begin_anew(initial(7))
        server.arrive()
        found = taken, answer.clock, server.look(), clock
        server.leave()
        return found

    want = initial(7) + sum(pushed(node, 0, 7) for node in (0, 1))
    for taken, clock, anew, slowest in between(2, 2, work):
        assert torch.equal(taken, want)
        assert clock == slowest == 3
        assert torch.equal(anew, initial(7))


def test_a_node_hands_over_what_one_worker_does() -> None:
    """Values once, and a header of 56 bytes for each of its workers; waits count, too."""

    def work(team: Team, place: int) -> Any:
        server = SlicedServer(team, torch.zeros(1000))
        server.push_pull(clock=1, least=1).wait()
        first = team.account.payload_bytes
        server.begin("push_pull", clock=2, least=2)
        server.take(wait=True)
        with team.account.paused():
            server.push()
            server.stage()
        second, waited = team.account.payload_bytes, team.account.wait_seconds
        server.arrive()
        server.leave()
        return first, second - first, server.pulled_bytes, waited

    for first, second, pulled, waited in between(2, 2, work):
        assert first == second == 56 + 1000  # a quarter of 4,000: half of the slice is here
        assert pulled == 2 * 1000
        assert waited > 4 * 0.001, "two round trips"


def test_without_nodes_everyone_agrees_with_itself() -> None:
    def work(team: Team, place: int) -> Any:
        return team.agree(place, -team.rank, 0.5), Team(team.fabric).agree(place, 2.0)

    for rank, (inside, alone) in enumerate(between(2, 2, work)):
        assert inside == [1.0, -(rank // 2), 0.5]
        assert alone == [rank % 2, 2.0]


def test_a_worker_that_fails_ends_all() -> None:
    """Its own at once, the other node by the connections that its own have ended."""

    def work(team: Team, place: int) -> Any:
        server = SlicedServer(team, torch.zeros(8))
        try:
            for clock in range(1, 100):
                team.host.sleep(0.01, "a step")
                server.push_pull(clock=clock, least=clock).wait()
        except CommunicationError as error:
            return str(error), team.host.now()
        return "nothing", 0.0

    results = between(2, 2, work, faults=[Kill(worker=3, at="0.2 s")])
    for text, seconds in results[:3]:
        assert "inside the node" in text or "between nodes" in text
        assert seconds < 2
