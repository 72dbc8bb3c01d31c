"""Second stages: their order, no deadlock whenever workers wait, and no wait for busy workers."""

import random
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offbeat
from offbeat import attach
from offbeat.quantization.wire import Wire
from offbeat.simulate import Compute, Network, simulate
from offbeat.transport.team import Team
from quantization.rounding import values
from quantization.wires import SIZE, every_world, gloo, simulated, start_sum
from transport.communicators import meet

LENGTHS = [5000, 700, 3000, 10, 9000, 2000, 4001]


def repeated_sums(wire: Wire, team: Team, *, at_random: bool) -> list[list[Tensor]]:
    """Poll and wait at random times, in random order, between other operations, or in order."""
    moments = random.Random(team.rank)
    results = []
    for repetition in range(3):
        handles = []
        for i, length in enumerate(LENGTHS):
            x = values(100 * repetition + 10 * i + team.rank, length)
            handles.append(start_sum(wire, x, f"sum {i}"))
            if not at_random:
                handles[i].wait()
                continue
            for _ in range(moments.randrange(4)):
                moments.choice(handles).done()
            if i == 4:
                assert team.communicator.sum(torch.ones(1), what="test").wait().item() == team.size
        for handle in moments.sample(handles, len(handles)):
            handle.wait()
        results.append([handle.wait() for handle in handles])
    return results


@every_world
def test_results_do_not_depend_on_when_workers_poll(world: Any) -> None:
    """Second stages start in the order of the first ones on all workers."""
    expected = simulated(partial(repeated_sums, at_random=False), "int8")
    for result in world(partial(repeated_sums, at_random=True), "int8"):
        for got, want in zip(result, expected[0], strict=True):
            for a, b in zip(got, want, strict=True):
                assert torch.equal(a, b)


def poll_early(wire: Wire, team: Team) -> bool:
    tensor = torch.zeros(1)
    if team.rank == 0:
        handle = start_sum(wire, torch.ones(4000))
        early = handle.done()
        for other in range(1, team.size):  # only now let the others start
            team.communicator.send(tensor, destination=other, tag=5, what="go").wait()
    else:
        team.communicator.receive(tensor, source=0, tag=5, what="go").wait()
        handle, early = start_sum(wire, torch.ones(4000)), False
    while not handle.done():
        pass
    return not early and bool((handle.wait() == team.size).all())


@every_world
def test_done_never_blocks(world: Any) -> None:
    assert all(world(poll_early, "int8"))


# -- busy workers ---------------------------------------------------------------------------------


def one_is_busy(wire: Wire, team: Team) -> bool:
    """Start two sums. The training thread of rank 0 is busy until the others have both results."""
    handles = [start_sum(wire, torch.ones(4000)) for _ in range(2)]
    if team.rank == 0:
        meet("the others have the sums", [0, 1, 2])
    totals = [handle.wait() for handle in handles]
    if team.rank > 0:
        meet("the others have the sums", [0, 1, 2])
    return all(bool((total == team.size).all()) for total in totals)


def test_a_sum_does_not_wait_for_a_busy_worker() -> None:
    """The chunk that rank 0 adds up reaches the others while its training thread is busy."""
    assert gloo(one_is_busy, "int8") == [True] * SIZE


def stream(steps: int) -> dict[str, Any]:
    """Train with streaming averaging. Returns the details of ``Stats``."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attach(model, optimizer, offbeat.StreamingAveraging(parts=1), wire="int8") as sync:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(1, 64)).square().mean().backward()
            optimizer.step()
        return dict(sync.stats.details)


def test_second_stages_start_while_workers_compute_in_virtual_time() -> None:
    """The second stage follows the first one at once, and a part lands in nearly every step."""
    seconds = 0.040
    network, compute = Network("1Gbit/s", latency="10us"), Compute(seconds)
    result = simulate(partial(stream, 10), workers=4, network=network, compute=compute)
    spans: dict[str, list[Any]] = {}
    for span in result.timeline:
        if span.rank == 0 and span.kind == "transfer" and span.what.startswith("launch"):
            spans.setdefault(span.what, []).append(span)
    both = [pair for pair in spans.values() if len(pair) == 2]
    assert len(both) >= 3
    assert all(second.start - first.start < 0.01 * seconds for first, second in both)
    mean = sum(second.end - first.start for first, second in both) / len(both)
    for details in result.results:
        assert details["landing_seconds"] == pytest.approx(mean, rel=0.01)
        assert details["landings"] >= 8
